"""Mathematical functions for loops, of float32, such that a compiler can use vector instructions.

    e^x = 2^n e^r,  n = round(x / log 2),  |r| <= log(2)/2:   e^r by a polynomial of degree 6

log 2 is subtracted n times in two parts, the first of which has few bits, so that r is exact
(Cody and Waite, 1980; the coefficients are those of Moshier's Cephes, expf).  The relative error is
below 2e-7.
"""

import numpy as np

F = np.float32
ZERO, HALF, ONE, INFINITY = F(0), F(0.5), F(1), F(np.inf)
LOWEST, HIGHEST = F(-87.3), F(88.3)  # 2^n is a normal number of float32
LOG2_E, LOG2_HIGH, LOG2_LOW = F(1.44269504), F(0.693359375), F(-2.12194440e-4)
E2, E3, E4 = F(5.0000001201e-1), F(1.6666665459e-1), F(4.1665795894e-2)
E5, E6, E7 = F(8.3334519073e-3), F(1.3981999507e-3), F(1.9875691500e-4)
BIAS, SHIFT = np.int32(127), np.int32(23)  # of the exponent in the bits of a float32
SIGN, MAGNITUDE = np.int32(31), np.int32(2**31 - 1)


def exp(x: np.float32) -> np.float32:
    """Return e^x: 0 where it would be below 1.2e-38, infinity above 2e38, NaN of NaN."""
    z = LOWEST if x < LOWEST else HIGHEST if x > HIGHEST else x
    n = np.floor(z * LOG2_E + HALF)
    r = (z - n * LOG2_HIGH) - n * LOG2_LOW
    p = ((((E7 * r + E6) * r + E5) * r + E4) * r + E3) * r + E2
    y = (p * r * r + r + ONE) * power(np.int32(n))
    return ZERO if x < LOWEST else INFINITY if x > HIGHEST else y


def exp_below(x: np.float32) -> np.float32:
    """Return e^x for x up to 88, NaN of NaN; at least 1.2e-38, which is nothing beside e^0."""
    z = LOWEST if x < LOWEST else x
    n = np.floor(z * LOG2_E + HALF)
    r = (z - n * LOG2_HIGH) - n * LOG2_LOW
    p = ((((E7 * r + E6) * r + E5) * r + E4) * r + E3) * r + E2
    return (p * r * r + r + ONE) * power(np.int32(n))


def power(n: np.int32) -> np.float32:
    """Return 2^n for n between -126 and 127."""
    return np.int32((n + BIAS) << SHIFT).view(np.float32)


def largest(x: np.ndarray, start: int, stop: int) -> np.float32:
    """Return the maximum of x[start:stop], which is not empty.

    It is that of integers in the same order, as the hardware's maximum of numbers is not one that
    a compiler may take in any order: NaN.
    """
    top = np.int32(-(2**31))
    for j in range(start, stop):
        top = np.int32(max(top, ordered(np.float32(x[j]).view(np.int32))))
    return np.int32(ordered(top)).view(np.float32)


def ordered(bits: np.int32) -> np.int32:
    """Return an integer such that these have the order of the numbers with such bits; and back."""
    return np.int32(bits ^ ((bits >> SIGN) & MAGNITUDE))
