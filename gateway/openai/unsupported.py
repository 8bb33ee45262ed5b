"""The parameters of OpenAI and vLLM that calls do not take, with the values of them that change nothing.

`gateway.openai.params` has those that a call takes.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple


class Unsupported(NamedTuple):
    """A parameter that is refused by its name. harmless: values of it that change nothing are not."""

    harmless: tuple[Any, ...] = ()
    why: str = ""


_NO_STATE: Final = "no answer is stored; send the whole conversation"

UNSUPPORTED: Final[dict[str, Unsupported]] = {
    "add_generation_prompt": Unsupported((True,)),
    "allowed_token_ids": Unsupported(),
    "audio": Unsupported(),
    "background": Unsupported((False,), "an answer goes to the call that asks for it"),
    "bad_words": Unsupported(),
    "best_of": Unsupported((1,)),
    "chat_template": Unsupported(),
    "chat_template_kwargs": Unsupported(),
    "context_management": Unsupported(),
    "continue_final_message": Unsupported((False,)),
    "conversation": Unsupported(why=_NO_STATE),
    "dimensions": Unsupported(why="an embedding has the size of the model's hidden states"),
    "documents": Unsupported(),
    "function_call": Unsupported(("none",)),
    "functions": Unsupported(([],)),
    "image": Unsupported(),
    "include_stop_str_in_output": Unsupported((False,)),
    "length_penalty": Unsupported((1.0, 1)),
    "max_tool_calls": Unsupported(),
    "modalities": Unsupported((["text"],)),
    "moderation": Unsupported(),
    "prediction": Unsupported(),
    "previous_response_id": Unsupported(why=_NO_STATE),
    "priority": Unsupported((0,)),
    "prompt_cache_options": Unsupported(),
    "prompt_cache_retention": Unsupported(),
    "prompt_logprobs": Unsupported(),
    "reasoning": Unsupported(({},)),
    "reasoning_effort": Unsupported(),
    "service_tier": Unsupported(("auto", "default")),
    "spaces_between_special_tokens": Unsupported((True,)),
    "store": Unsupported((False,), "no answer is stored"),
    "suffix": Unsupported(("",), "models have no common form of a prompt with a gap"),
    "tool_choice": Unsupported(("none", "auto")),
    "tools": Unsupported(([],)),
    "truncate_prompt_tokens": Unsupported(),
    "use_beam_search": Unsupported((False,)),
    "verbosity": Unsupported(),
    "web_search_options": Unsupported(),
}
# Values that change nothing, of parameters that a call has not.
HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    name: one.harmless for name, one in UNSUPPORTED.items() if one.harmless
} | {"parallel_tool_calls": (True, False)}  # where there are no tools
# Parameters of one call that another has not.
ELSEWHERE: Final = {
    **dict.fromkeys(("echo", "prompt"), "/v1/completions"),
    **dict.fromkeys(("max_completion_tokens", "messages"), "/v1/chat/completions"),
    **dict.fromkeys(
        ("parallel_tool_calls", "tool_choice", "tools", "top_logprobs"),
        "/v1/chat/completions and /v1/responses",
    ),
    **dict.fromkeys(("include", "instructions", "max_output_tokens", "text", "truncation"), "/v1/responses"),
    "encoding_format": "/v1/embeddings",
    "input": "/v1/responses and /v1/embeddings",
    "max_tokens": "/v1/completions and /v1/chat/completions; here it is max_output_tokens",
    "response_format": "/v1/completions and /v1/chat/completions; here it is text.format",
}
