import pytest

from phalanx_runtime.core.pages import PagePool


def test_pages_come_in_order_and_the_last_given_back_comes_first() -> None:
    pool = PagePool(4, 16)
    assert pool.take(3) == [0, 1, 2]
    pool.give_back([0, 1])
    assert pool.take(2) == [0, 1]
    assert pool.free_pages == 1


def test_nothing_is_taken_when_too_few_pages_are_free() -> None:
    pool = PagePool(2, 16)
    assert pool.take(3) is None
    assert pool.free_pages == 2


def test_a_shared_page_is_free_after_its_last_holder() -> None:
    pool = PagePool(2, 16)
    pages = pool.take(1)
    assert pages is not None
    pool.share(pages)
    pool.give_back(pages)
    assert pool.free_pages == 1
    assert pool.check([pages]) == []
    pool.give_back(pages)
    assert pool.free_pages == 2


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert PagePool(1, 16).pages_for(tokens) == pages


def test_giving_back_twice_is_a_bug() -> None:
    pool = PagePool(1, 16)
    pages = pool.take(1)
    assert pages is not None
    pool.give_back(pages)
    with pytest.raises(AssertionError, match="once too often"):
        pool.give_back(pages)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(pages)


def test_check_names_what_is_wrong() -> None:
    pool = PagePool(3, 16)
    held = pool.take(2)
    assert held == [0, 1]
    assert pool.check([[0, 1]]) == []
    assert pool.check([[0]]) == ["page 1 has 1 holders, expected 0"]
    assert pool.check([[0, 1, 2]]) == ["page 2 has 0 holders, expected 1"]


def test_check_sees_pages_lost_doubled_and_free_while_held() -> None:
    pool = PagePool(3, 16)
    pool.take(1)
    pool._free.pop()
    assert "1 pages are neither free nor held" in pool.check([[0]])
    pool._free.append(2)
    assert "1 pages are in the free list twice" in pool.check([[0]])
    pool._free.append(0)
    assert "page 0 is free and held" in pool.check([[0]])


@pytest.mark.parametrize(("pages", "size"), [(0, 16), (1, 0)])
def test_an_empty_pool_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages={pages} page_size={size}"):
        PagePool(pages, size)
