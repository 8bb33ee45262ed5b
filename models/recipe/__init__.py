"""How the demo model is made: corpus, tokenizer, network, schedule, training, evaluation, export."""
