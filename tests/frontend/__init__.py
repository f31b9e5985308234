"""Tests of the OpenAI door. `openai_suite` is also run by the tests of runtime, router and cluster."""

import pytest

for module in ("openai_suite", "openai_target", "openai_choices", "openai_tokens"):
    pytest.register_assert_rewrite(f"tests.frontend.{module}")
