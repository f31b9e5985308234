"""Tests of the API server. Tests of runtime, router and cluster run `openai_suite` too."""

import pytest

for module in ("openai_suite", "openai_target", "openai_choices", "openai_tokens"):
    pytest.register_assert_rewrite(f"tests.frontend.{module}")
