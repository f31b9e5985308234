"""Tests of the OpenAI door. `openai_suite` is also run by the tests of runtime, router and cluster."""

import pytest

pytest.register_assert_rewrite("tests.frontend.openai_suite")
