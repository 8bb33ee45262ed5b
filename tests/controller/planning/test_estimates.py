"""The configuration map from measured fingerprints: known truths are found again."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.deployments import Configuration, CostModel, Estimate, Intent, Profile
from bus.precisions import Precision
from controller.planning.estimates import estimate_all
from controller.planning.intent import UnmetError, rank
from controller.planning.latency import LatencyModel
from controller.planning.memory import MemoryModel, kv_blocks
from controller.planning.uncertainty import between, exactly, line_at, repeated, slope_of
from tests.support.known_truths import BLOCK_BYTES, PAIR, SINGLE, STAGED, Truth, profile_of

INTENT = Intent(prompt_tokens=256, output_tokens=64)
QUANTISED: tuple[Precision, ...] = ("int8", "int4")


def estimate(profile: Profile, configuration: Configuration = SINGLE, intent: Intent = INTENT) -> Estimate:
    degrees, stages = (1, 2, 4, 8), max(configuration.pp, 1)
    found = estimate_all(profile, intent, degrees=degrees, max_stages=stages)
    return next(one for one in found if one.configuration == configuration)


# --------------------------------------------------------------------------- latency


def test_two_lengths_and_two_sizes_give_ttft_and_tpot_of_the_whole_model() -> None:
    """The paper's 2x2 and 4x4: four samples, four unknowns."""
    truth = Truth(per_context=0.0)
    profile = profile_of(truth, shapes=((256, 1),))
    assert len(profile.latency) == 4
    found = estimate(profile)
    assert found.ttft_s.value == pytest.approx(truth.ttft(32, SINGLE, 256, 1))
    assert found.tpot_s.value == pytest.approx(truth.tpot(32, SINGLE, 0, 1))
    assert found.latency_s.value == pytest.approx(truth.latency(SINGLE, INTENT))


def test_latency_is_ttft_and_a_tpot_for_each_token_after_the_first() -> None:
    found = estimate(profile_of(Truth(), noise=0.05, repetitions=5))
    assert found.latency_s.value == pytest.approx(found.ttft_s.value + 63 * found.tpot_s.value)


@pytest.mark.parametrize(
    ("prompt", "output", "batch"), [(64, 33, 1), (256, 64, 4), (100, 200, 2), (16, 8, 1), (512, 64, 8)]
)
def test_other_prompts_lengths_and_batches_are_found_between_and_beyond(
    prompt: int, output: int, batch: int
) -> None:
    intent = Intent(prompt_tokens=prompt, output_tokens=output, batch_size=batch)
    found = estimate(profile_of(Truth()), intent=intent)
    assert found.latency_s.value == pytest.approx(Truth().latency(SINGLE, intent), rel=0.02)


def test_longer_outputs_read_more_keys_and_values() -> None:
    truth, intent = Truth(per_context=1e-6), Intent(prompt_tokens=64, output_tokens=512)
    found = estimate(profile_of(truth), intent=intent)
    assert found.latency_s.value == pytest.approx(truth.latency(SINGLE, intent), rel=0.01)


def test_a_grid_with_holes_is_filled_from_its_row_and_column() -> None:
    """Prompts in batches of one, batches of one prompt: as few samples as there can be."""
    profile = profile_of(Truth(other=0.0, layer=0.0), shapes=((64, 1), (256, 1), (64, 4)))
    intent = Intent(prompt_tokens=256, output_tokens=32, batch_size=4)
    found = estimate(profile, intent=intent)
    assert found.ttft_s.value == pytest.approx(Truth(other=0.0, layer=0.0).ttft(32, SINGLE, 256, 4))
    assert found.latency_s.basis == "extrapolated"


def test_beyond_the_longest_prompt_attention_goes_on_with_the_square_if_the_samples_tell() -> None:
    truth, intent = Truth(attention=1e-8), Intent(prompt_tokens=2048, output_tokens=2)
    curved = profile_of(truth, shapes=((64, 1), (256, 1), (512, 1)))
    assert estimate(curved, intent=intent).ttft_s.value == pytest.approx(
        truth.ttft(32, SINGLE, 2048, 1), rel=1e-3
    )
    straight = profile_of(truth, shapes=((64, 1), (256, 1)))  # two prompts cannot tell
    assert estimate(straight, intent=intent).ttft_s.value < 0.7 * truth.ttft(32, SINGLE, 2048, 1)


def test_noise_alone_makes_no_curve() -> None:
    profile = profile_of(Truth(), shapes=((64, 1), (256, 1), (512, 1)), noise=0.02, repetitions=9, seed=2)
    intent = Intent(prompt_tokens=1024, output_tokens=2)
    found = estimate(profile, intent=intent)
    assert found.ttft_s.value == pytest.approx(Truth().ttft(32, SINGLE, 1024, 1), rel=0.2)


@given(
    layers=st.integers(8, 40),
    others=st.floats(0.0, 3.0),  # embedding, head and sampling, in layers: 2.4 of Llama-3 8B
    layer=st.floats(1e-4, 1e-2),
    per_token=st.floats(1e-7, 1e-5),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_a_quiet_machine_gives_latency_within_ten_and_memory_within_five_per_cent(
    layers: int, others: float, layer: float, per_token: float, seed: int
) -> None:
    truth = Truth(layers=layers, other=others * layer, layer=layer, per_token=per_token)
    truth = replace(truth, all_reduce=0.1 * layer, hop=0.2 * layer)
    profile = profile_of(truth, configurations=(SINGLE, PAIR, STAGED), noise=0.002, repetitions=9, seed=seed)
    for configuration in (SINGLE, PAIR, STAGED, Configuration(tp=4), Configuration(tp=2, pp=2)):
        found = estimate(profile, configuration)
        assert found.latency_s.value == pytest.approx(truth.latency(configuration, INTENT), rel=0.1)
        assert found.memory_bytes.value == pytest.approx(truth.memory(configuration, INTENT), rel=0.05)


def test_one_slow_repetition_does_not_move_the_estimate() -> None:
    found = estimate(profile_of(Truth(), repetitions=5, outliers=True))
    assert found.latency_s.value == pytest.approx(Truth().latency(SINGLE, INTENT), rel=0.01)


def test_what_disturbs_the_prompts_of_a_run_does_not_count_as_decodes() -> None:
    """One run tells both lengths: medians of each would be of different runs."""
    quiet = profile_of(Truth(per_context=0.0), shapes=((256, 1),), repetitions=3)
    slow = (0.0, 0.8, 0.2)  # seconds more that the prompts of each run take
    slower = (0.0, 0.0, 0.9)  # and what comes behind them
    latency = [
        replace(
            one,
            seconds=[
                seconds + prompts + (one.output_tokens > 1) * decodes
                for seconds, prompts, decodes in zip(one.seconds, slow, slower, strict=True)
            ],
        )
        for one in quiet.latency
    ]
    found = estimate(replace(quiet, latency=latency))
    assert found.tpot_s.value == pytest.approx(Truth().tpot(32, SINGLE, 0, 1))


def test_the_spread_of_the_samples_is_carried_through_and_grows_with_the_layers() -> None:
    few, many = (
        estimate(profile_of(Truth(layers=layers), noise=0.02, repetitions=9)).latency_s for layers in (4, 40)
    )
    for one in (few, many):
        assert one.low < one.value < one.high
    assert (many.high - many.low) / many.value > (few.high - few.low) / few.value
    quiet = estimate(profile_of(Truth(layers=40), noise=0.002, repetitions=9)).latency_s
    assert quiet.high - quiet.low < 0.2 * (many.high - many.low)


def test_without_repetitions_nothing_is_known_of_the_spread() -> None:
    found = estimate(profile_of(Truth())).latency_s
    assert found.low == found.value == found.high


# --------------------------------------------------------------------------- degrees, stages, precisions


def test_a_degree_nobody_measured_follows_from_two_that_were() -> None:
    profile = profile_of(Truth(), configurations=(SINGLE, PAIR))
    four = Configuration(tp=4)
    found = estimate(profile, four)
    assert found.latency_s.value == pytest.approx(Truth().latency(four, INTENT), rel=0.01)
    assert LatencyModel(profile).work(32).timing(four, INTENT).tpot.basis == "extrapolated"


def test_another_precision_has_the_speed_up_of_the_one_that_was_measured_at_that_degree() -> None:
    eighth, eighths = Configuration(precision="int8"), Configuration(tp=2, precision="int8")
    profile = profile_of(Truth(), configurations=(SINGLE, PAIR, eighth))
    found = estimate(profile, eighths)
    assert found.latency_s.value == pytest.approx(Truth().latency(eighths, INTENT), rel=0.01)
    assert found.latency_s.basis == "extrapolated"


def test_ranks_add_two_sums_for_each_layer_to_their_own_work() -> None:
    truth = Truth(all_reduce=2e-4, hop=1e-4)
    found = estimate(profile_of(truth, configurations=(SINGLE, PAIR)), PAIR)
    assert found.latency_s.value == pytest.approx(truth.latency(PAIR, INTENT), rel=0.01)
    assert found.latency_s.basis == "extrapolated"
    said = INTENT.output_tokens * (2 * 32 * 2e-4 + 2 * 1e-4)
    quiet = estimate(profile_of(Truth(), configurations=(SINGLE, PAIR)), PAIR)
    assert found.latency_s.value - quiet.latency_s.value == pytest.approx(said)


@pytest.mark.parametrize(("batch", "steps"), [(1, [(1, 250), (1, 262)]), (2, [(1, 500), (1, 500), (1, 24)])])
def test_a_rank_has_its_part_of_a_groups_first_step_and_more_where_others_have_no_prompts(
    batch: int, steps: list[tuple[int, int]]
) -> None:
    profile = profile_of(Truth(), configurations=(SINGLE, PAIR), max_num_batched_tokens=512)
    model, intent = LatencyModel(profile), Intent(prompt_tokens=512, output_tokens=2, batch_size=batch)
    assert model._chunks(PAIR, intent) == steps
    assert model._chunks(Configuration(tp=2, pp=2), intent)[0][1] == 512
    own = model.work(32).timing(PAIR, intent)
    assert estimate(profile, PAIR, intent).ttft_s.value == pytest.approx(own.ttft.value + own.tpot.value)


def test_without_a_peer_what_ranks_say_is_taken_for_nothing_and_that_is_assumed() -> None:
    truth = Truth(all_reduce=2e-4)
    found = estimate(profile_of(truth, configurations=(SINGLE, PAIR), has_links=False), PAIR)
    assert found.latency_s.basis == "assumed"
    assert found.latency_s.value == pytest.approx(Truth().latency(PAIR, INTENT), rel=0.01)


def test_of_more_than_two_ranks_the_sums_are_assumed_between_once_and_once_for_each_further_rank() -> None:
    truth, four = Truth(all_reduce=2e-4), Configuration(tp=4)
    found = estimate(profile_of(truth, configurations=(SINGLE, PAIR)), four)
    assert found.latency_s.basis == "assumed"
    own, sums = Truth().latency(four, INTENT), 64 * 64 * 2e-4
    assert found.latency_s.value == pytest.approx(truth.latency(four, INTENT), rel=0.01)
    assert found.latency_s.low < own + sums * 1.1
    assert found.latency_s.high > own + sums * 1.9


def test_the_largest_batch_that_no_rank_was_measured_in_is_to_the_others_as_on_one_worker() -> None:
    truth = Truth()
    whole = profile_of(truth, configurations=(SINGLE, PAIR))
    latency = [
        one
        for one in whole.latency
        if (one.configuration, one.prompt_tokens, one.batch_size) != (PAIR, 256, 4)
    ]
    intent = Intent(prompt_tokens=256, output_tokens=32, batch_size=4)
    found = estimate(replace(whole, latency=latency), PAIR, intent)
    assert found.latency_s.value == pytest.approx(truth.latency(PAIR, intent), rel=0.01)


def test_without_a_second_device_a_degree_is_assumed_between_no_gain_and_all_of_it() -> None:
    alone, found = (estimate(profile_of(Truth()), one) for one in (SINGLE, PAIR))
    assert found.latency_s.basis == found.memory_bytes.basis == "assumed"
    assert found.latency_s.low <= 0.52 * alone.latency_s.value
    assert found.latency_s.high >= 0.98 * alone.latency_s.value
    truth = Truth().memory(PAIR, INTENT)
    assert found.memory_bytes.low < truth < found.memory_bytes.high


def test_stages_cost_a_hop_each_if_one_was_measured() -> None:
    truth = Truth(hop=1e-3)
    profile = profile_of(truth)
    for stages in (2, 4):
        configuration = Configuration(pp=stages)
        found = estimate(profile, configuration)
        assert found.latency_s.value == pytest.approx(truth.latency(configuration, INTENT), rel=0.01)
        assert found.latency_s.basis == "extrapolated"


def test_a_batch_in_parts_is_as_fast_as_its_first_stage_makes_all_of_them() -> None:
    """Sequences add nothing here: two parts of two take twice what the first stage takes for all."""
    truth = Truth(other=4e-2, per_sequence=0.0, per_context=0.0)
    intent = Intent(prompt_tokens=64, output_tokens=33, batch_size=4)
    first = truth.tpot(16, SINGLE, 0, 2)
    found = estimate(profile_of(truth), STAGED, intent)
    assert 2 * first > truth.tpot(32, SINGLE, 0, 2)
    assert found.tpot_s.value == pytest.approx(2 * first + first / 32, rel=0.01)


def test_a_batch_in_parts_goes_through_all_stages_where_these_are_balanced() -> None:
    truth = Truth(other=0.0, hop=1e-3, per_sequence=4e-4, per_context=0.0)
    intent = Intent(prompt_tokens=64, output_tokens=33, batch_size=4)
    through = truth.tpot(32, SINGLE, 0, 2) + 2 * truth.hop
    found = estimate(profile_of(truth), STAGED, intent)
    assert found.tpot_s.value == pytest.approx(through + truth.tpot(16, SINGLE, 0, 2) / 32, rel=0.01)
    assert found.tpot_s.value < truth.tpot(32, SINGLE, 0, 4)


def test_chunks_of_a_long_prompt_follow_each_other_through_the_stages() -> None:
    truth = Truth(other=0.0, layer=0.0, hop=1e-3)
    intent = Intent(prompt_tokens=1024, output_tokens=2)
    profile = profile_of(truth, max_num_batched_tokens=512)
    alone, staged = (estimate(profile, one, intent) for one in (SINGLE, STAGED))
    assert staged.ttft_s.value == pytest.approx(0.75 * alone.ttft_s.value + 2 * truth.hop, rel=0.01)


def test_without_a_measured_hop_stages_are_as_fast_as_one_and_say_that_it_is_assumed() -> None:
    profile = profile_of(Truth(), has_links=False)
    alone, staged = (estimate(profile, one) for one in (SINGLE, STAGED))
    assert staged.latency_s.value == alone.latency_s.value
    assert staged.latency_s.basis == staged.ttft_s.basis == "assumed"


def test_the_map_has_every_degree_stages_and_precision_once() -> None:
    precisions = [SINGLE, *(Configuration(precision=one) for one in QUANTISED)]
    found = estimate_all(
        profile_of(Truth(), configurations=precisions), INTENT, degrees=(1, 2, 4), max_stages=3
    )
    assert len({one.configuration for one in found}) == len(found) == 27


def test_there_are_no_more_stages_than_layers() -> None:
    profile = profile_of(Truth(layers=3))
    assert max(one.configuration.pp for one in estimate_all(profile, INTENT, max_stages=8)) == 3


def test_a_precision_without_both_kinds_of_samples_is_not_in_the_map() -> None:
    whole = profile_of(Truth(), configurations=(SINGLE, Configuration(precision="int8")))
    profile = replace(whole, memory=[one for one in whole.memory if one.configuration == SINGLE])
    assert [one.configuration for one in estimate_all(profile, INTENT)] == [SINGLE]
    assert estimate_all(replace(profile, latency=[]), INTENT) == []


def test_a_precision_nobody_measured_on_one_device_has_no_timing() -> None:
    latency = LatencyModel(profile_of(Truth(), configurations=(PAIR,)))
    assert latency.precisions() == []
    for configuration in (SINGLE, STAGED, Configuration(tp=4)):
        with pytest.raises(KeyError, match="full was not measured on a single device"):
            latency.timing(configuration, INTENT)


def test_what_was_measured_of_the_whole_model_is_taken_as_it_is() -> None:
    truth = Truth()
    fingerprints = profile_of(truth, shapes=((256, 1),))
    slower = profile_of(replace(truth, layer=8e-4), sizes=(32,), shapes=((256, 1),))
    profile = replace(
        fingerprints,
        latency=fingerprints.latency + slower.latency,
        memory=fingerprints.memory + slower.memory,
    )
    found = estimate(profile)
    assert found.latency_s.basis == found.memory_bytes.basis == "measured"
    assert found.ttft_s.value == pytest.approx(replace(truth, layer=8e-4).ttft(32, SINGLE, 256, 1))


def test_from_fingerprints_everything_is_extrapolated() -> None:
    found = estimate(profile_of(Truth()))
    assert {found.latency_s.basis, found.memory_bytes.basis, found.cost.basis} == {"extrapolated"}


def test_loss_is_none_at_full_precision_and_unknown_where_nobody_predicted_it() -> None:
    precisions = [SINGLE, *(Configuration(precision=one) for one in QUANTISED)]
    profile = profile_of(Truth(), configurations=precisions, loss={"int8": 0.004})
    losses = {one.configuration.precision: one.loss for one in estimate_all(profile, INTENT)}
    assert losses["full"] is not None and losses["full"].value == 0.0
    assert losses["int8"] is not None and losses["int8"].value == 0.004
    assert losses["int4"] is None


# --------------------------------------------------------------------------- memory and cost


def test_three_samples_give_the_memory_of_every_configuration() -> None:
    """W, A and A_p: degree and stages beyond those that were measured follow exactly from a linear truth."""
    profile = profile_of(Truth(), configurations=(SINGLE, PAIR, STAGED))
    for tp, pp in ((1, 1), (2, 1), (1, 2), (4, 1), (1, 4), (2, 2), (8, 4)):
        configuration = Configuration(tp=tp, pp=pp)
        found = estimate(profile, configuration).memory_bytes
        assert found.value == pytest.approx(Truth().memory(configuration, INTENT), rel=1e-9), (tp, pp)
        assert found.basis == "extrapolated"


@pytest.mark.parametrize(("tp", "pp"), [(1, 2), (1, 4), (2, 2)])
def test_unmeasured_stages_are_assumed_to_have_the_activations_of_a_step_each(tp: int, pp: int) -> None:
    profile = profile_of(Truth(), configurations=(SINGLE, PAIR))
    found = estimate(profile, Configuration(tp=tp, pp=pp)).memory_bytes
    truth, group, one = Truth(), Configuration(tp=tp), Configuration(tp=tp, pp=pp)
    ends = truth.weights(truth.layers, group) - truth.weights(truth.layers, one)  # at the leader alone
    ranks = truth.memory(group, INTENT) - ends
    assert found.value == pytest.approx(ranks + tp * (pp - 1) * Truth().activation_bytes)
    assert (found.basis, found.high) == ("assumed", found.value)
    assert found.low == pytest.approx(ranks)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (4, 1)])
def test_weights_that_only_their_layout_tells_are_exact_and_the_rest_is_assumed(tp: int, pp: int) -> None:
    profile = profile_of(Truth(), configurations=(SINGLE, PAIR, STAGED))
    laid_out = [
        replace(one, activation_bytes=None) if one.configuration.num_devices > 1 else one
        for one in profile.memory
    ]
    found = estimate(replace(profile, memory=laid_out), Configuration(tp=tp, pp=pp)).memory_bytes
    weights = Truth().weights(Truth().layers, Configuration(tp=tp, pp=pp))
    rest = Truth().memory(SINGLE, INTENT) - Truth().weights(Truth().layers, SINGLE)
    again = (tp * pp - 1) * Truth().activation_bytes
    assert (found.value, found.low) == pytest.approx((weights + rest + again, weights + rest))
    assert (found.basis, found.high) == ("assumed", found.value)


def test_more_samples_than_unknowns_are_met_by_least_squares() -> None:
    profile = profile_of(Truth(), configurations=(SINGLE, PAIR, Configuration(tp=4)))
    memory = [
        replace(one, weight_bytes=one.weight_bytes + (1 << 16) * (one.configuration.tp == 2))
        for one in profile.memory
    ]
    found = estimate(replace(profile, memory=memory), PAIR).memory_bytes.value
    assert 0 < found - Truth().memory(PAIR, INTENT) < 1 << 16


def test_the_kv_of_the_batch_is_part_of_the_memory() -> None:
    profile = profile_of(Truth())
    intent = replace(INTENT, batch_size=3, prompt_tokens=250)
    assert kv_blocks(profile, intent) == 3 * 20
    one, three = (estimate(profile, intent=each).memory_bytes.value for each in (INTENT, intent))
    assert three - one == 2 * 20 * 32 * BLOCK_BYTES


@pytest.mark.parametrize("cost", ["memory_seconds", "memory", "gpu_hours"])
def test_cost_is_what_the_intent_says_it_is(cost: CostModel) -> None:
    profile = profile_of(Truth(), configurations=(SINGLE, PAIR))
    found = estimate(profile, PAIR, replace(INTENT, cost=cost))
    memory, seconds = found.memory_bytes.value, found.latency_s.value
    assert found.gpu_hours.value == pytest.approx(2 * seconds / 3600)
    wanted = {"memory": memory, "memory_seconds": memory * seconds, "gpu_hours": 2 * seconds / 3600}
    assert found.cost.value == pytest.approx(wanted[cost])


def test_what_a_device_needs_is_its_layers_and_on_the_first_stage_embedding_and_head() -> None:
    truth = Truth()
    memory = MemoryModel(profile_of(truth, configurations=(SINGLE, PAIR)))
    need = memory.need(STAGED, INTENT)
    assert need.layer_bytes == truth.layer_bytes + 20 * BLOCK_BYTES
    assert need.lead_bytes == truth.embedding_bytes
    assert need.of(16, leads=True) == need.of(16) + truth.embedding_bytes


def test_ranks_load_all_of_it_before_they_keep_their_shards() -> None:
    memory = MemoryModel(profile_of(Truth(), configurations=(SINGLE, PAIR)))
    assert memory.need(PAIR, INTENT) == memory.need(SINGLE, INTENT)
    shards = memory.need(PAIR, INTENT, whole_first=False)
    assert shards.layer_bytes == (1.25 * Truth().layer_bytes + 20 * BLOCK_BYTES) / 2


# --------------------------------------------------------------------------- lines


def test_a_line_through_two_points_solves_two_equations() -> None:
    points = [(1.0, exactly(5.0)), (3.0, exactly(9.0))]
    assert (line_at(points, 0).value, slope_of(points).value) == (3.0, 2.0)


def test_median_and_quartiles_leave_the_slow_one_out() -> None:
    found = repeated([1.0, 1.1, 0.9, 1.0, 7.0])
    assert (found.value, found.down) == (1.0, 0.0)
    assert found.up == pytest.approx(0.1)


def test_between_points_is_extrapolated_and_at_a_point_it_is_what_was_measured() -> None:
    points = [(1.0, exactly(1.0)), (2.0, exactly(4.0)), (4.0, exactly(16.0))]
    assert (between(points, 2.0).value, between(points, 2.0).basis) == (4.0, "measured")
    assert (between(points, 3.0).value, between(points, 3.0).basis) == (10.0, "extrapolated")
    assert between(points, 5.0).value == 22.0
    assert between(points, 5.0, is_convex=True).value == 25.0
    assert between(points, 0.0).value == -2.0
    assert between(points[:1], 2.0).basis == "assumed"


# --------------------------------------------------------------------------- the form of the KV cache


def test_kv_in_8_bits_is_one_more_choice_with_its_memory_and_its_loss() -> None:
    intent = Intent(prompt_tokens=256, output_tokens=64, batch_size=8)
    profile = replace(profile_of(Truth()), kv_gain=2.0, kv_loss=0.001, loss={"int4": 0.03})
    rows = {one.configuration: one for one in estimate_all(profile, intent)}
    for full, one in rows.items():
        if full.kv_dtype != "full":
            continue
        other = rows[replace(full, kv_dtype="int8")]
        kv_bytes = kv_blocks(profile, intent) * BLOCK_BYTES * profile.num_layers
        assert other.memory_bytes.value == pytest.approx(one.memory_bytes.value - kv_bytes / 2)
        assert other.latency_s.value == one.latency_s.value and other.latency_s.basis != "measured"
        assert one.loss and other.loss and other.loss.value == pytest.approx(one.loss.value + 0.001)
        memory = MemoryModel(profile)
        saved = memory.need(full, intent).layer_bytes - memory.need(other.configuration, intent).layer_bytes
        assert saved == pytest.approx(kv_bytes / 2 / profile.num_layers, abs=1)
    unknown = estimate_all(replace(profile, kv_loss=None), intent)
    assert all((one.loss is None) == (one.configuration.kv_dtype == "int8") for one in unknown)
    assert {one.configuration.kv_dtype for one in estimate_all(profile_of(Truth()), intent)} == {"full"}


def test_kv_in_8_bits_by_the_workers_settings_is_also_had_by_its_name() -> None:
    """An intent may fix it: that of a deployment whose record was lost fixes all that it has."""
    profile = replace(profile_of(Truth()), kv_dtype="int8", kv_loss=0.001)
    asked = Intent(tp=1, pp=1, precision="full", kv_dtype="int8")
    (named,) = rank(estimate_all(profile, asked), asked)
    by_shape = {one.configuration: one for one in estimate_all(profile, Intent())}
    assert {shape.kv_dtype for shape in by_shape} == {"full"}
    as_set = by_shape[replace(named.configuration, kv_dtype="full")]
    assert (named.memory_bytes, named.latency_s) == (as_set.memory_bytes, as_set.latency_s)
    assert named.loss and named.loss.value == 0.001 and as_set.loss == named.loss


def test_kv_in_8_bits_by_the_workers_settings_counts_as_a_loss() -> None:
    profile = replace(profile_of(Truth()), kv_dtype="int8", kv_loss=0.005)
    (found,) = rank(estimate_all(profile, INTENT), INTENT)
    assert found.loss and (found.loss.value, found.loss.basis) == (0.005, "extrapolated")
    for intent, words in (
        (replace(INTENT, max_loss=0.0), r"loses 0\.50% of perplexity by its KV cache \(worker\.kv_dtype\)"),
        (replace(INTENT, kv_dtype="full"), r"fixes kv_dtype full, .* in int8, as worker\.kv_dtype says"),
    ):
        with pytest.raises(UnmetError, match=words):
            rank(estimate_all(profile, intent), intent)
    unknown = replace(profile, kv_loss=None)
    with pytest.raises(UnmetError, match=r"worker\.kv_dtype says, loses is not known: run `instar profile`"):
        rank(estimate_all(unknown, INTENT), INTENT)
    fixed = replace(INTENT, precision="full")
    assert [one.loss for one in rank(estimate_all(unknown, fixed), fixed)] == [None]
