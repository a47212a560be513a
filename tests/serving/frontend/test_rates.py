"""Buckets against one that is refilled in small steps, with exact fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.frontend.access import MINUTE_NS, Bucket

SECOND_NS = 1_000_000_000


class Plain:
    """A plain bucket: it has so many tokens, and gets more as time passes."""

    def __init__(self, per_minute: int) -> None:
        self.per_minute, self.has, self.at_ns = per_minute, Fraction(per_minute), 0

    def at(self, now_ns: int) -> Fraction:
        """Returns the tokens that it has at a time."""
        gained = Fraction(self.per_minute * (now_ns - self.at_ns), MINUTE_NS)
        self.has, self.at_ns = min(Fraction(self.per_minute), self.has + gained), now_ns
        return self.has

    def take(self, count: int, now_ns: int) -> None:
        self.has = self.at(now_ns) - count


steps = st.lists(
    st.tuples(st.integers(0, 90 * SECOND_NS), st.integers(0, 300)), min_size=1, max_size=60
)


@given(st.integers(1, 1000), steps)
def test_lets_in_whom_a_plain_bucket_lets_in(per_minute, steps):
    bucket, plain, now_ns = Bucket(per_minute), Plain(per_minute), 0
    # Each taking rounds up by less than a nanosecond's worth.
    off = Fraction(per_minute * (len(steps) + 1), MINUTE_NS)
    for gap_ns, count in steps:
        now_ns += gap_ns
        has, wait_ns = plain.at(now_ns), bucket.wait_ns(now_ns)
        if has >= 1 + off:
            assert wait_ns == 0
        if has < 1:
            wanted_ns = (1 - has) * MINUTE_NS / per_minute
            assert wanted_ns <= wait_ns <= wanted_ns + len(steps) + 2
        bucket.take(count, now_ns)
        plain.take(count, now_ns)


@given(st.integers(1, 1000), steps)
def test_the_time_to_come_back_is_exact(per_minute, steps):
    bucket, now_ns = Bucket(per_minute), 0
    for gap_ns, count in steps:
        now_ns += gap_ns
        if wait_ns := bucket.wait_ns(now_ns):
            assert bucket.wait_ns(now_ns + wait_ns) == 0
            assert bucket.wait_ns(now_ns + wait_ns - 1) == 1
        bucket.take(count, now_ns)


@pytest.mark.parametrize("per_minute", [1, 7, 60, 199])
def test_a_minute_has_what_it_may_and_the_burst_of_the_first(per_minute):
    """A client that asks every 10 ms gets what was in the bucket, and then an even rate."""
    bucket, let_in = Bucket(per_minute), [0, 0]
    for step in range(12_000):
        now_ns = step * SECOND_NS // 100
        if not bucket.wait_ns(now_ns):
            bucket.take(1, now_ns)
            let_in[now_ns >= MINUTE_NS] += 1
    assert let_in[0] in (2 * per_minute, 2 * per_minute - 1)
    assert let_in[1] in (per_minute, per_minute - 1, per_minute + 1)


def test_a_debt_is_waited_for():
    bucket = Bucket(60)
    bucket.take(600, 0)  # nine minutes more than there was
    assert bucket.wait_ns(0) == 9 * MINUTE_NS + SECOND_NS


@pytest.mark.parametrize(("then", "wait_s"), [(120, 0), (30, 62), (60, 1)])
def test_what_is_missing_stays_missing_at_another_rate(then, wait_s):
    bucket = Bucket(60)
    bucket.take(60, 0)
    assert bucket.wait_ns(0) == SECOND_NS
    bucket.change(then, 0)
    # 60 are missing: of a bucket of 120 as many are left, one of 30 has a debt of 30.

    assert bucket.wait_ns(0) == wait_s * SECOND_NS


def test_no_limit():
    bucket = Bucket(0)
    bucket.take(10**12, 0)
    assert bucket.wait_ns(0) == 0
    bucket.change(60, 0)
    assert bucket.wait_ns(0) == 0
