"""The house rules of the product code hold: see `make house` for the table."""

import pytest

from tests.architecture.house import MAX_FOLDER, MAX_MODULE_LINES, MAX_MODULES, MAX_ODD_PER_1000, House, measure


@pytest.fixture(scope="module")
def house() -> House:
    return measure()


def test_there_are_few_modules(house: House) -> None:
    assert house.modules <= MAX_MODULES


def test_no_folder_is_large(house: House) -> None:
    assert {folder: n for folder, n in house.per_folder.items() if n > MAX_FOLDER} == {}


def test_no_module_is_large(house: House) -> None:
    assert house.largest[0] <= MAX_MODULE_LINES, house.largest


def test_class_names_are_unique_within_a_program(house: House) -> None:
    assert house.duplicate_classes == []


def test_functions_fit_a_screen(house: House) -> None:
    assert house.long_functions == []


def test_calls_with_many_arguments_name_them(house: House) -> None:
    assert house.positional_calls == []


def test_packages_have_no_cycles(house: House) -> None:
    assert house.package_cycles == []


def test_prose_uses_the_words_of_the_field(house: House) -> None:
    assert house.odd_per_1000 <= MAX_ODD_PER_1000, house.odd_words.most_common(12)
