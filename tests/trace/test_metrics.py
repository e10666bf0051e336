import numpy as np
import pytest

from npglm.trace.metrics import F32_FLOOR, check, errors, judge


def test_errors_are_relative_to_the_truths_largest_and_rms():
    truth = np.array([[3.0, -4.0]])
    e = errors(np.array([[3.0, -4.4]], np.float32), truth)
    assert e.max == pytest.approx(0.1)
    assert e.rms == pytest.approx(0.08)
    assert e.where == (0, 1)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_non_finite_value_fails_whatever_the_bound(value):
    truth = np.ones(4)
    x = truth.copy()
    x[2] = value
    verdict = judge(x, truth, truth, floor=1e9)
    assert not verdict.ok
    assert verdict.errors.misplaced == 1
    assert verdict.errors.where == (2,)


def test_equal_non_finite_values_pass_and_swapped_signs_do_not():
    truth = np.array([-np.inf, 1.0, np.nan, np.inf])
    assert errors(truth, truth).max == 0
    assert errors(np.array([np.inf, 1.0, np.nan, np.inf]), truth).misplaced == 1
    assert errors(np.array([-np.inf, 1.0, np.inf, np.inf]), truth).misplaced == 1


def test_a_nan_twin_allows_nothing():
    truth = np.ones(3)
    assert not judge(truth, np.full(3, np.nan), truth).ok


def test_the_bound_is_twice_the_twins_error_plus_the_floor():
    truth, twin = np.ones(1000), np.ones(1000)
    twin[0] = 1 + 1e-5
    x = truth.copy()
    x[1] = 1 + 2e-5 + 0.9 * F32_FLOOR
    check(x, twin, truth)
    x[1] = 1 + 2e-5 + 1.5 * F32_FLOOR
    with pytest.raises(AssertionError):
        check(x, twin, truth)


def test_unknown_values_are_not_looked_at():
    truth = np.array([1.0, 2.0, 3.0])
    x = np.array([1.0, np.nan, 0.0])
    assert errors(x, truth, np.array([True, False, False])).max == 0
    assert errors(x, truth, np.zeros(3, bool)).where is None


def test_shapes_must_be_equal_and_zero_truth_is_not_forgiving():
    with pytest.raises(ValueError, match=r"\[3\]"):
        errors(np.zeros(3), np.zeros((3, 1)))
    assert errors(np.full(3, 1e-30), np.zeros(3)).max == np.inf
    assert errors(np.zeros(3), np.zeros(3)).max == 0
