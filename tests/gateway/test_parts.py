"""Pure parts of the gateway: dispatch, limits, keys, the in-state table."""

from __future__ import annotations

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
from gateway.http.limits import Admission, RateLimiter
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


def test_one_key_leaves_room_for_the_next_where_several_share_the_queue() -> None:
    admission = Admission(max_queue=16, max_inflight=64, is_shared=lambda: True)

    def most_of(key: str) -> int:
        slots = []
        with pytest.raises(ApiError, match=r"requests of this key wait.*max_queue is 16") as refusal:
            while True:
                slots.append(admission.reserve(key))
                admission.check_integrity()
        assert (refusal.value.status, refusal.value.code) == (503, "server_overloaded")
        return len(slots)

    assert [most_of(key) for key in ("heavy", "next", "third")] == [8, 4, 2]
    last = admission.reserve("last")
    with pytest.raises(ApiError, match="this call has 9 sequences"):
        last.grow(9)
    last.release()
    admission.check_integrity()
    alone = Admission(max_queue=16, max_inflight=16)
    assert len([alone.reserve("heavy") for _ in range(16)]) == 16, "a key that shares with none has it all"


def test_one_key_cannot_run_all_that_may_run() -> None:
    admission = Admission(max_queue=64, max_inflight=8, is_shared=lambda: True)
    for _ in range(4):
        admission.reserve("heavy").start_one()
    with pytest.raises(ApiError, match=r"4 requests of this key wait or run.*max_inflight is 8"):
        admission.reserve("heavy")
    admission.reserve("light")


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
