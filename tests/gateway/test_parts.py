"""Pure parts of the gateway: dispatch, limits, keys, the in-state table."""

from __future__ import annotations

import contextlib
import timeit
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.api_keys import ANONYMOUS, ApiKey, Scope, new_key, plain_key
from bus.messages import SamplingParams
from gateway.delivery.dispatch import Candidate, TooLong, choose
from gateway.delivery.request import GenerationRequest, InstanceAddress, RequestState
from gateway.delivery.table import RequestTable
from gateway.errors import ApiError
from gateway.http.auth import Keys, check_admin, check_api
from gateway.http.limits import Admission, RateLimiter, Slot
from tests.support.gateway_core import Ear

ADMIN: tuple[Scope, ...] = ("admin-read", "admin-write")
KEY, ANOTHER = plain_key("key", "inference"), plain_key("another", "inference")


def candidate(name: str, **changes: Any) -> Candidate:
    base: dict[str, Any] = {
        "instance": name,
        "worker": name,
        "epoch": 1,
        "max_tokens": 100,
        "num_measured": 0.0,
        "num_own": 0,
        "num_own_since": 0,
    }
    return Candidate(**(base | changes))


def chosen(*candidates: Candidate, tokens: int = 10) -> str:
    found = choose(candidates, tokens)
    assert isinstance(found, Candidate)
    return found.instance


def test_the_least_loaded_instance_takes_the_request() -> None:
    assert chosen(candidate("a", num_measured=3.0), candidate("b", num_measured=2.0)) == "b"


def test_requests_sent_since_the_metric_count() -> None:
    a = candidate("a", num_measured=1.0, num_own_since=3, num_own=3)
    assert chosen(a, candidate("b", num_measured=2.0)) == "b"


def test_a_stale_metric_is_not_an_idle_instance() -> None:
    assert chosen(candidate("a", num_measured=None, num_own=5), candidate("b", num_measured=4.0)) == "b"


def test_our_own_requests_are_a_lower_bound_of_the_load() -> None:
    a = candidate("a", num_measured=0.5, num_own=6)
    assert chosen(a, candidate("b", num_measured=4.0)) == "b"


def test_of_equals_the_emptier_cache_wins_then_the_name() -> None:
    assert chosen(candidate("a", kv_usage=0.5), candidate("b", kv_usage=0.1)) == "b"
    assert chosen(candidate("b"), candidate("a")) == "a"


def test_only_an_instance_that_can_hold_the_request_takes_it() -> None:
    assert chosen(candidate("a"), candidate("b", max_tokens=500, num_measured=9.0), tokens=300) == "b"
    assert choose([candidate("a"), candidate("b", max_tokens=200)], 300) == TooLong(200)
    assert choose([], 1) is None


def test_the_queue_bound_counts_what_has_not_begun() -> None:
    admission = Admission(max_queue=2, max_inflight=3)
    first, second = admission.reserve(), admission.reserve()
    with pytest.raises(ApiError, match="max_queue is 2"):
        admission.reserve()
    first.start_one()
    third = admission.reserve()
    second.start_one()
    with pytest.raises(ApiError, match="max_inflight is 3"):
        admission.reserve()
    for slot in (first, second, third, third):
        slot.release()
    admission.check_integrity()
    assert (admission.queued, admission.inflight) == (0, 0)


def test_a_call_that_could_never_fit_the_queue_is_refused_for_good() -> None:
    slot = Admission(max_queue=4, max_inflight=8).reserve()
    with pytest.raises(ApiError) as refusal:
        slot.grow(5)
    assert refusal.value.status == 400
    slot.grow(4)


def most_of(admission: Admission, key: str, weight: float = 1.0, size: int = 1) -> list[Slot]:
    """Return the slots that a key gets until it is refused."""
    slots = []
    with pytest.raises(ApiError) as refusal:
        while True:
            slot = admission.reserve(key, weight)
            slots.append(slot)
            slot.grow(size)
            admission.check_integrity()
    assert (refusal.value.status, refusal.value.code) == (503, "server_overloaded")
    admission.check_integrity()
    return slots


def num_left(slots: list[Slot]) -> int:
    """Return the requests of slots that were not pushed out."""
    left = 0
    for slot in slots:
        with contextlib.suppress(ApiError):
            slot.raise_if_pushed_out()
            left += slot.size
    return left


def test_a_key_fills_the_queue_that_others_leave_and_makes_room_when_they_come() -> None:
    admission = Admission(max_queue=16, max_inflight=64, is_shared=lambda: True)
    heavy = most_of(admission, "heavy")
    assert len(heavy) == 16, "alone it gets all"
    refusals = list[ApiError]()
    heavy[-1].watch(refusals.append)
    admission.reserve("light").release()
    assert "a key with fewer requests" in refusals[0].message and num_left(heavy) == 15, "the youngest left"
    other = most_of(admission, "next")
    assert (num_left(heavy), num_left(other)) == (8, 8), "two keys share it"
    third = most_of(admission, "third")
    assert sorted(map(num_left, (heavy, other, third))) == [5, 5, 6]
    with pytest.raises(ApiError, match="took this one's place"):
        heavy[-1].grow(2)
    admission.check_integrity()


def test_the_places_in_a_full_queue_follow_the_weights() -> None:
    admission = Admission(max_queue=16, max_inflight=64, is_shared=lambda: True)
    light, heavy = most_of(admission, "light"), most_of(admission, "heavy", 3.0)
    assert (num_left(light), num_left(heavy)) == (4, 12)


def test_a_call_of_several_requests_leaves_the_queue_as_a_whole_and_what_has_begun_stays() -> None:
    admission = Admission(max_queue=16, max_inflight=64, is_shared=lambda: True)
    begun, _, young = (admission.reserve("heavy") for _ in range(3))
    for slot, size in ((begun, 9), (young, 6)):
        slot.grow(size)
    begun.start_one()
    light = admission.reserve("light")
    light.grow(2)
    assert (num_left([begun]), num_left([young]), admission.queued) == (9, 0, 11)
    with pytest.raises(ApiError, match=r"12 requests are waiting; gateway.max_queue is 16"):
        admission.reserve("next").grow(15)
    admission.check_integrity()


def test_calls_whose_bodies_have_not_come_make_room_first() -> None:
    admission = Admission(max_queue=4, max_inflight=8)
    slots = [admission.reserve() for _ in range(4)]
    with contextlib.ExitStack() as bodies:
        for slot in (slots[2], slots[1]):
            bodies.enter_context(slot.awaiting_body())
        admission.reserve()
        assert [num_left([slot]) for slot in slots] == [1, 1, 0, 1], "the one that waited longest"
        with pytest.raises(ApiError, match="whose body had not come"):
            slots[2].grow(1)
        admission.check_integrity()
    with pytest.raises(ApiError, match="4 requests are waiting"):
        admission.reserve()
    assert not admission.bodiless


def test_one_key_cannot_run_all_that_may_run() -> None:
    admission = Admission(max_queue=64, max_inflight=18, is_shared=lambda: True)
    for _ in range(16):
        admission.reserve("heavy").start_one()
    with pytest.raises(ApiError, match=r"16 requests of this key wait or run.*max_inflight is 18"):
        admission.reserve("heavy")
    admission.reserve("light")
    alone = Admission(max_queue=16, max_inflight=16)
    assert len(most_of(alone, "heavy")) == 16, "a key that shares with none has it all"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 6), st.sampled_from("rsx")), max_size=60))
def test_the_counts_of_admission_stay_whole_whatever_is_taken_begun_and_given_back(
    moves: list[tuple[str, int, str]],
) -> None:
    admission = Admission(max_queue=8, max_inflight=12, is_shared=lambda: True)
    slots = list[Slot]()
    for key, size, move in moves:
        with contextlib.suppress(ApiError):
            if move == "r":
                slots.append(admission.reserve(key))
                slots[-1].grow(size)
            elif slots and move == "s":
                slots[size % len(slots)].start_one()
            elif slots:
                slots.pop(size % len(slots)).release()
        admission.check_integrity()
    for slot in slots:
        slot.release()
    assert (admission.queued, admission.inflight) == (0, 0) and admission.is_empty.is_set()


def test_known_keys_cost_a_call_nothing() -> None:
    def seconds(num_keys: int) -> float:
        keys = Keys(())
        keys.replace_stored([new_key(f"{number}")[1] for number in range(num_keys)])
        return min(timeit.repeat(lambda: bool(keys) and len(keys), number=2000, repeat=5))

    assert seconds(2000) < 5 * seconds(2)


def test_requests_per_minute_refill_evenly() -> None:
    now = [0.0]
    limiter = RateLimiter(rpm=2, concurrent=0, clock=lambda: now[0])
    for remaining in ("1", "0"):
        with limiter.enter(KEY) as use:
            assert use.headers["x-ratelimit-remaining-requests"] == remaining
    with pytest.raises(ApiError) as refusal, limiter.enter(KEY):
        pass
    assert (refusal.value.status, refusal.value.headers["retry-after"]) == (429, "30")
    with limiter.enter(ANOTHER):
        pass
    now[0] = 30.0
    with limiter.enter(KEY):
        pass


def test_requests_at_once_are_limited_per_key() -> None:
    limiter = RateLimiter(rpm=0, concurrent=1)
    with limiter.enter(KEY):
        with pytest.raises(ApiError, match="at once"), limiter.enter(KEY):
            pass
        with limiter.enter(ANOTHER):
            pass
    with limiter.enter(KEY):
        pass


def limited(*, rpm: int = 0, tpm: int = 0, concurrent: int = 0) -> ApiKey:
    return ApiKey(id="limited", name="limited", rpm=rpm, tpm=tpm, concurrent=concurrent)


def test_tokens_per_minute_count_prompts_ahead_and_answers_when_they_have_ended() -> None:
    now = [0.0]
    limiter, key = RateLimiter(rpm=0, concurrent=0, clock=lambda: now[0]), limited(tpm=60)
    with limiter.enter(key) as use:
        use.take_prompts(20)
        assert use.headers == {
            "x-ratelimit-limit-tokens": "60",
            "x-ratelimit-remaining-tokens": "40",
            "x-ratelimit-reset-tokens": "20.0s",
        }
        use.take_output(70)  # more than is left: a debt of 30
    with pytest.raises(ApiError, match="over 60 tokens per minute") as refusal, limiter.enter(key):
        pass
    assert (refusal.value.status, refusal.value.headers["retry-after"]) == (429, "31")
    assert refusal.value.headers["x-ratelimit-remaining-tokens"] == "0"
    now[0] = 31.0
    with limiter.enter(key) as use, pytest.raises(ApiError, match="the 11 of this prompt") as refusal:
        use.take_prompts(11)
    assert refusal.value.headers["retry-after"] == "10"
    now[0] = 200.0
    with limiter.enter(key) as use:
        use.take_prompts(100)  # it would never fit, so it goes when the bucket is full, and leaves a debt
    with pytest.raises(ApiError), limiter.enter(key):
        pass


def test_who_waits_as_long_as_a_refusal_says_is_not_refused_again() -> None:
    now = [0.0]
    limiter, key = RateLimiter(rpm=0, concurrent=0, clock=lambda: now[0]), limited(tpm=600, rpm=30)
    was_refused, num_refusals = False, 0
    for _ in range(200):
        try:
            with limiter.enter(key) as use:
                use.take_prompts(37)
                use.take_output(11)
            was_refused = False
        except ApiError as refusal:
            # One limit may follow another: a call that may begin again may still lack tokens for its prompt.
            assert not was_refused or "of this prompt" in refusal.message
            was_refused, num_refusals = True, num_refusals + 1
            now[0] += int(refusal.headers["retry-after"])
    assert num_refusals > 50


def test_a_key_has_its_own_limits_before_those_of_the_settings_and_takes_new_ones_at_once() -> None:
    limiter = RateLimiter(rpm=1, concurrent=1, clock=lambda: 0.0)
    with limiter.enter(limited(rpm=10, concurrent=2)), limiter.enter(limited(rpm=10, concurrent=2)) as use:
        assert use.headers["x-ratelimit-remaining-requests"] == "8"
        with pytest.raises(ApiError, match="the limit is 2"), limiter.enter(limited(rpm=10, concurrent=2)):
            pass
    with limiter.enter(limited(rpm=20)) as use:
        assert use.headers["x-ratelimit-remaining-requests"] == "17", "what was taken stays taken"
    with limiter.enter(KEY), pytest.raises(ApiError, match="the limit is 1"), limiter.enter(KEY):
        pass


def test_keys_of_the_file_have_scopes_and_keys_of_the_settings_those_of_their_api() -> None:
    api, admin = Keys(["of-the-settings"], is_closed=True), Keys([], "", ADMIN)
    assert api and not admin
    reader, writer = new_key("reader", scopes=("admin-read",)), new_key("writer", scopes=("admin-write",))
    caller = new_key("caller", weight=2.0)
    for keys in (api, admin):
        keys.replace_stored([caller[1]])
    assert not admin, "a key that may not use /admin does not close it to this machine"
    for keys in (api, admin):
        keys.replace_stored([one for _, one in (reader, writer, caller)])
    assert admin and len(api) == 2

    def may(keys: Keys, text: str, scope: Scope) -> bool:
        headers = [(b"authorization", f"Bearer {text}".encode())]
        try:
            return bool(keys.check(headers, scope).id)
        except ApiError as refusal:
            assert (refusal.status, refusal.code) == (403, "insufficient_scope")
            return False

    scopes: tuple[Scope, ...] = ("inference", "admin-read", "admin-write")
    assert [may(api, reader[0], scope) for scope in scopes] == [False, True, False]
    assert [may(api, writer[0], scope) for scope in scopes] == [False, True, True]
    assert [may(api, caller[0], scope) for scope in scopes] == [True, False, False]
    assert may(api, "of-the-settings", "inference")
    for keys in (api, admin):
        keys.replace_stored([])
    with pytest.raises(ApiError) as refusal:
        api.check([(b"authorization", f"Bearer {caller[0]}".encode())])
    assert refusal.value.status == 401
    with pytest.raises(ApiError):
        Keys([], is_closed=True).check([])


def test_keys_are_told_apart_and_wrong_ones_refused() -> None:
    keys = Keys(["alpha", "beta"])
    assert keys.check([(b"authorization", b"Bearer beta")]) != keys.check(
        [(b"authorization", b"bearer alpha")]
    )
    for headers in ([], [(b"authorization", b"Basic alpha")], [(b"authorization", b"Bearer gamma")]):
        with pytest.raises(ApiError) as refusal:
            keys.check(headers)
        assert (refusal.value.status, refusal.value.code) == (401, "invalid_api_key")


def test_without_admin_keys_only_this_machine_administers() -> None:
    check_admin(Keys([]), [], "127.0.0.1", loopback_only=False)
    check_admin(Keys([]), [], "::ffff:127.0.0.1", loopback_only=False)
    check_admin(Keys([]), [], "172.17.0.1", loopback_only=True)
    with pytest.raises(ApiError) as refusal:
        check_admin(Keys([]), [], "10.0.0.7", loopback_only=False)
    assert refusal.value.status == 403


@pytest.mark.parametrize(
    "headers",
    [
        [(b"host", b"evil.example:8000")],
        [(b"host", b"localhost.evil.example")],
        [(b"host", b"localhost:8000"), (b"origin", b"https://evil.example")],
        [(b"host", b"localhost:8000"), (b"origin", b"http://localhost:3000")],
        [(b"host", b"localhost:8000"), (b"origin", b"null")],
        [(b"host", b"localhost:8000"), (b"origin", b"")],
    ],
)
def test_without_admin_keys_no_page_of_another_site_administers(headers: list[tuple[bytes, bytes]]) -> None:
    for loopback_only in (True, False):
        with pytest.raises(ApiError) as refusal:
            check_admin(Keys([]), headers, "127.0.0.1", loopback_only=loopback_only)
        assert refusal.value.status == 403
    check_admin(
        Keys(["k"], "", ADMIN), [*headers, (b"authorization", b"Bearer k")], "9.9.9.9", loopback_only=False
    )


@pytest.mark.parametrize("host", [b"localhost:8000", b"127.0.0.1:8000", b"[::1]:8000", b"LOCALHOST"])
def test_a_page_of_our_own_administers_without_keys(host: bytes) -> None:
    headers = [(b"host", host), (b"origin", b"http://" + host)]
    check_admin(Keys([]), headers, "127.0.0.1", loopback_only=True)


@pytest.mark.parametrize(
    "headers",
    [
        [(b"host", b"evil.example:8000")],
        [(b"host", b"localhost.evil.example")],
        [(b"host", b"localhost:8000"), (b"origin", b"https://evil.example")],
        [(b"host", b"10.0.0.7:8000"), (b"origin", b"https://10.evil.example:8443")],
        [(b"host", b"localhost:8000"), (b"origin", b"null")],
        [(b"host", b"localhost:8000"), (b"origin", b"")],
        [(b"origin", b"https://evil.example")],
        [(b"host", b"localhost:8000"), (b"origin", b"http://8.8.8.8")],
        [(b"host", b"localhost:8000"), (b"origin", b"http://[2001:4860:4860::8888]:80")],
        [(b"host", b"localhost:8000"), (b"origin", b"http://[")],
        [(b"host", b"localhost:8000"), (b"origin", b"https://\xe9vil.example")],
        [(b"host", b"")],
    ],
)
def test_without_api_keys_no_page_of_a_public_site_calls(headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(ApiError, match=r"gateway\.api_keys is empty") as refusal:
        check_api(Keys([]), headers)
    assert (refusal.value.status, refusal.value.code) == (403, "api_host_refused")
    assert check_api(Keys(["k"]), [*headers, (b"authorization", b"Bearer k")])


@pytest.mark.parametrize(
    "host",
    [
        b"localhost:8000",
        b"127.0.0.1",
        b"[::1]:8000",
        b"10.0.0.7:8000",
        b"gateway:8000",
        b"host.docker.internal",
        b"instar.default.svc",
    ],
)
def test_without_api_keys_this_machine_and_its_neighbours_call(host: bytes) -> None:
    own = b"http://" + host
    others = (b"http://localhost:5173", b"http://192.168.1.7", b"app://obsidian.md")
    for headers in ([], *([(b"origin", origin)] for origin in (own, *others))):
        assert check_api(Keys([]), [(b"host", host), *headers]) is ANONYMOUS
    assert check_api(Keys([]), []) is ANONYMOUS


def test_a_page_that_the_settings_trust_calls_without_keys() -> None:
    headers = [(b"host", b"localhost:8000"), (b"origin", b"https://chat.example")]
    assert check_api(Keys([]), headers, ["https://chat.example"]) is ANONYMOUS
    for trusted in ([], ["https://chat.example:8443"], ["http://chat.example"]):
        with pytest.raises(ApiError):
            check_api(Keys([]), headers, trusted)
    rebound = [(b"host", b"evil.example"), (b"origin", b"https://chat.example")]
    with pytest.raises(ApiError):
        check_api(Keys([]), rebound, ["https://chat.example"])


def state(name: str) -> RequestState:
    request = GenerationRequest(
        id=name,
        model="m",
        prompt_token_ids=[1, 2],
        sampling=SamplingParams(max_tokens=4, seed=0),
        arrived=0.0,
    )
    return RequestState(request, Ear(), deadline=1.0)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["add", "send", "void", "end"]))))
def test_the_table_stays_whole_whatever_happens_to_flights(events: list[tuple[str, str]]) -> None:
    table = RequestTable()
    attempts: dict[str, int] = {}
    for name, event in events:
        known = table.requests.get(name)
        if event == "add" and known is None:
            table.add(state(name))
        elif event == "send" and known is not None and known.target is None:
            table.assign(known, InstanceAddress("i", f"w{len(name)}", 1))
            assert known.attempt == attempts.get(name, 0) + 1 or known.attempt == 1
            attempts[name] = known.attempt
        elif event == "void" and known is not None and known.target is not None:
            table.unassign(known)
        elif event == "end" and known is not None:
            table.remove(known)
            attempts.pop(name, None)
        table.check_integrity()


def test_flights_of_older_epochs_are_found_with_the_lost_one() -> None:
    table = RequestTable()
    for epoch, name in enumerate("abc"):
        one = state(name)
        table.add(one)
        table.assign(one, InstanceAddress("m@w", "w", epoch))
    assert [one.id for one in table.at_worker("w", 1)] == ["a", "b"]
    assert table.at_worker("other", 9) == []
