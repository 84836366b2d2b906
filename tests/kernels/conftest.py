"""Failures in the shared tests are explained as those in any test."""

import pytest

pytest.register_assert_rewrite('op_tests')
