"""KV pages found by their contents."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.scheduling.prefixes import (
    EXACT,
    NOBODYS,
    Brownout,
    Names,
    OutOfPages,
    PagePool,
)

PARTIAL, FULL = (2, 2), (1, 2)


def names_of(tokens, model=0, salt="", size=4):
    return Names(model, salt, size).upto(len(tokens) // size, lambda: tokens)


def test_names_are_of_all_tokens_up_to_a_pages_end():
    tokens = list(range(16))
    first = names_of(tokens)
    assert len(set(first)) == 4
    assert names_of(tokens[:11]) == first[:2]
    for at in range(16):
        other = [*tokens[:at], 99, *tokens[at + 1 :]]
        changed = [a != b for a, b in zip(names_of(other), first, strict=True)]
        assert changed == [block >= at // 4 for block in range(4)]


def test_names_are_of_one_model_salt_and_order():
    tokens = [1] * 8
    every = [names_of(tokens, model, salt) for model in (0, 1, 10) for salt in ("", "a", "0:")]
    assert len({name for names in every for name in names}) == 9 * 2


def test_names_are_made_once_and_go_on():
    asked = []

    def tokens():
        asked.append(1)
        return list(range(12))

    names = Names(0, "", 4)
    two = list(names.upto(2, tokens))
    names.upto(2, tokens)
    assert len(asked) == 1
    assert names.upto(3, tokens)[:2] == two


@pytest.mark.parametrize(
    ("had", "accepted", "is_within"),
    [
        (EXACT, EXACT, True),
        (EXACT, Brownout(0, PARTIAL), True),
        (Brownout(60, PARTIAL), EXACT, False),
        (Brownout(60, PARTIAL), Brownout(60, PARTIAL), True),
        (Brownout(60, PARTIAL), Brownout(40, PARTIAL), True),
        (Brownout(60, PARTIAL), Brownout(61, PARTIAL), False),
        (Brownout(60, PARTIAL), Brownout(40, (2, 4)), False),
        (Brownout(60, PARTIAL), Brownout(40, FULL), False),
        (NOBODYS, Brownout(0, PARTIAL), False),
    ],
)
def test_what_a_request_accepts(had, accepted, is_within):
    assert had.is_within(accepted) == is_within


def test_brownout_one_after_the_other():
    forty, sixty = Brownout(40, PARTIAL), Brownout(60, PARTIAL)
    assert sixty.and_then(forty) == forty.and_then(sixty) == forty
    assert EXACT.and_then(sixty) == sixty.and_then(EXACT) == sixty
    assert sixty.and_then(Brownout(40, FULL)) == NOBODYS
    assert NOBODYS.and_then(EXACT) == EXACT.and_then(NOBODYS) == NOBODYS


def test_the_less_degraded_page_is_kept():
    pool = PagePool(8)
    worse, better, third = pool.allocate(3)
    pool.keep(b"n", worse, Brownout(40, PARTIAL))
    pool.keep(b"n", better, EXACT)
    pool.keep(b"n", third, EXACT)
    assert [kept.page for kept in pool.find([b"n"], EXACT)] == [better]
    pool.free([worse, third, better])
    assert (pool.num_free, pool.num_idle) == (8, 1)


def test_a_page_of_another_kind_of_brownout_makes_way():
    pool = PagePool(8)
    old, new, more = pool.allocate(3)
    pool.keep(b"n", old, Brownout(60, FULL))
    pool.keep(b"n", new, Brownout(50, PARTIAL))
    pool.keep(b"n", more, Brownout(40, PARTIAL))
    assert [kept.page for kept in pool.find([b"n"], Brownout(50, PARTIAL))] == [new]


def test_a_beginning_ends_where_a_page_is_missing():
    pool = PagePool(8)
    pages = pool.allocate(3)
    for name, page in zip((b"a", b"c", b"d"), pages, strict=True):
        pool.keep(name, page, EXACT)
    assert [k.page for k in pool.find([b"a", b"b", b"c"], EXACT)] == pages[:1]


def test_of_unused_pages_the_end_goes_before_the_beginning():
    pool = PagePool(4)
    pages = pool.allocate(4)
    for number, page in enumerate(pages):
        pool.keep(bytes([number]), page, EXACT)
    pool.free(pages)
    pool.allocate(1)
    every = [bytes([number]) for number in range(4)]
    assert [k.page for k in pool.find(every, EXACT)] == pages[:3]
    assert pool.num_evicted == 1


def test_what_is_held_is_never_taken():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.keep(b"a", page, EXACT)
    pool.share([page])
    pool.free([page])
    with pytest.raises(OutOfPages):
        pool.allocate(2)
    pool.free([page])
    assert len(pool.allocate(2)) == 2
    assert not pool.find([b"a"], EXACT)


def test_nothing_is_shared_that_nobody_keeps():
    pages = PagePool(2)
    (page,) = pages.allocate(1)
    pages.free([page])
    with pytest.raises(ValueError, match="has nothing to share"):
        pages.share([page])
    with pytest.raises(ValueError, match="nothing to keep"):
        pages.keep(b"a", page, EXACT)


def test_a_rank_that_was_lost_has_nothing():
    pool = PagePool(4)
    held, idle = pool.allocate(2)
    pool.keep(b"a", held, EXACT)
    pool.keep(b"b", idle, EXACT)
    pool.free([idle])
    pool.drop_all()
    assert not pool.find([b"a"], EXACT)
    assert (pool.num_free, pool.num_idle) == (3, 0)
    pool.free([held])
    pool.check_idle()


MOVES = st.lists(st.tuples(st.sampled_from(["begin", "end", "keep", "drop"]), st.integers(0, 9)))


@given(MOVES)
def test_pages_and_holders_are_conserved(moves):
    """Against an independent count of who holds what, and which contents are to be found."""
    pool, sequences, contents = PagePool(6), [], {}
    for move, number in moves:
        name = bytes([number % 4])
        if move == "begin":
            found = [k.page for k in pool.find([name], EXACT)]
            needed = 2 - sum(not pool.is_idle(page) for page in found)
            if needed > pool.num_free:
                continue
            pool.share(found)
            own = pool.allocate(2 - len(found))
            for page in own:
                contents.pop(page, None)
            for page in found:
                assert contents[page] == name
            sequences.append([*found, *own])
        elif move == "end" and sequences:
            pool.free(sequences.pop(number % len(sequences)))
        elif move == "keep" and sequences:
            page = sequences[number % len(sequences)][-1]
            if page not in contents:
                contents[page] = name
                pool.keep(name, page, EXACT)
        elif move == "drop":
            pool.drop_all()
        held = {page for pages in sequences for page in pages}
        assert pool.num_free == 6 - len(held)
        for page in held:
            assert pool.num_holders(page) == sum(page in pages for pages in sequences)
    for pages in sequences:
        pool.free(pages)
    pool.check_idle()
