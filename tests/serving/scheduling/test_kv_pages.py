"""Who owns which KV page."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from serving.scheduling.prefixes import OutOfPages, PagePool


class Owners(RuleBasedStateMachine):
    """Requests that take pages and give them back, in any order."""

    NUM_PAGES = 9

    def __init__(self):
        super().__init__()
        self.pages = PagePool(self.NUM_PAGES)
        self.owned = []

    @rule(count=st.integers(0, NUM_PAGES + 2))
    def allocate(self, count):
        free = self.pages.num_free
        if count > free:
            with pytest.raises(OutOfPages, match=f"{count} pages wanted, {free} of 9 free"):
                self.pages.allocate(count)
        else:
            got = self.pages.allocate(count)
            assert len(got) == count
            self.owned.append(got)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data):
        gone = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.pages.free(gone)
        for page in gone[:1]:
            with pytest.raises(ValueError, match=f"page {page} is freed twice"):
                self.pages.free([page])

    @invariant()
    def every_page_is_free_or_owned_once(self):
        held = [page for pages in self.owned for page in pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(self.NUM_PAGES))
        assert self.pages.num_free == self.NUM_PAGES - len(held)
        if held:
            with pytest.raises(AssertionError, match=f"{len(held)} pages leaked"):
                self.pages.check_idle()
        else:
            self.pages.check_idle()


TestOwners = Owners.TestCase
TestOwners.settings = settings(max_examples=60, database=None, derandomize=True)


def test_pages_that_are_no_pages():
    with pytest.raises(ValueError, match="num_pages is 0; it must be at least 1"):
        PagePool(0)
    pages = PagePool(4)
    pages.allocate(4)
    for page in (-1, 4):
        with pytest.raises(ValueError, match=f"page {page} is not one of 0 to 3"):
            pages.free([page])
    assert pages.num_free == 0
