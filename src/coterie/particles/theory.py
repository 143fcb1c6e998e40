"""The theorems' numbers: rates, horizons, what mass stays near a minimiser, beta_0, alpha_0, and whether they are met.

fedcbo-jmlr.txt Theorem 3 and Lemma 5, fedcb2o.txt Theorem 2.2. The conditions are sufficient and far from necessary:
alpha_0 and beta_0 of small problems are already out of reach, so beta_0 is given by its logarithm.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from coterie.errors import ConfigError, explain


@dataclass(frozen=True)
class Setting:
    """What the rates are made of: the dynamics' numbers, the dimension, and how sharp the theorem is to be."""

    dimension: int  # d
    drift: float = 1.0  # lambda, lambda_1
    noise: float = 1.0  # sigma, sigma_1
    gradient_drift: float = 0.0  # lambda_2
    gradient_noise: float = 0.0  # sigma_2
    lipschitz: float = 0.0  # M, of the gradients; Theorem 3's text has it so, its (10c) uses the letter for their bound
    vartheta: float = 0.0  # what of the rate is given away for finite alpha

    @property
    def full_rate(self) -> float:
        """2 lambda_1 - 2 lambda_2 M - d sigma_1^2 - d sigma_2^2 M^2; of CB²O 2 lambda - d sigma^2."""
        own = 2.0 * self.gradient_drift * self.lipschitz + self.dimension * (self.gradient_noise * self.lipschitz) ** 2
        return 2.0 * self.drift - self.dimension * self.noise**2 - own

    @property
    def rate(self) -> float:
        """How fast V decays at least, fedcbo-jmlr.txt (15), fedcb2o.txt Theorem 2.2."""
        return (1.0 - self.vartheta) * self.full_rate

    def horizon(self, energy: float, accuracy: float) -> float:
        """T* by which V has fallen from `energy` to `accuracy` epsilon, fedcbo-jmlr.txt (14), fedcb2o.txt (2.6)."""
        if self.rate <= 0:
            do = "Lower noise or gradient_drift, or raise drift."
            raise ConfigError(explain("rate", round(self.rate, 6), "above 0: 2 drift > d noise^2 and more", do))
        if not 0 < accuracy < energy:
            raise ConfigError(explain("accuracy", accuracy, f"above 0, below {energy}, what V is at first"))
        return math.log(energy / accuracy) / self.rate

    @property
    def consensus_error(self) -> float:
        """c: (15) holds while the consensus is nearer to the minimiser than c sqrt V, fedcbo-jmlr.txt (39)."""
        spread = self.dimension * self.noise**2  # d sigma^2
        linear = 0.5 * self.vartheta * self.full_rate / (math.sqrt(2.0) * (self.drift + spread))
        return min(linear, math.sqrt(self.vartheta * self.full_rate / spread)) if spread else linear

    def mass_rate(self, radius: float, distance: float) -> float:
        """q of fedcbo-jmlr.txt Lemma 5: how fast the mass in a ball around a minimiser can vanish at most.

        distance: B, the farthest the consensus is from the minimiser. The lemma's c is any number that meets (35); this
        takes the best of a hundred.
        """
        least = self._least_c()
        choices = [least + (1.0 - least) * i / 101 for i in range(1, 101)]
        return min(self._mass_rate(radius, distance, c) for c in choices)

    def _least_c(self) -> float:
        """The smaller end of the c in (1/2, 1) with (2 c - 1) c >= d (1 - c)^2."""
        d = self.dimension  # (2 - d) c^2 + (2 d - 1) c - d = 0
        if d == 2:
            return 2.0 / 3.0
        return ((1.0 - 2.0 * d) + math.sqrt((2.0 * d - 1.0) ** 2 + 4.0 * (2.0 - d) * d)) / (2.0 * (2.0 - d))

    def _mass_rate(self, r: float, b: float, c: float) -> float:
        first, second, d = self.drift, self.noise, self.dimension
        pulled = 2.0 * first * (math.sqrt(c) * r + b) * math.sqrt(c) / ((1.0 - c) ** 2 * r)
        spread = 2.0 * second**2 * (c * r**2 + b**2) * (2.0 * c + d) / ((1.0 - c) ** 4 * r**2)
        rate = max(pulled + spread, _over(4.0 * first**2, (2.0 * c - 1.0) * second**2))
        if self.gradient_drift or self.gradient_noise:
            down = 2.0 * self.gradient_drift * c * self.lipschitz / (1.0 - c) ** 2
            shaken = (self.gradient_noise * self.lipschitz) ** 2 * c * (2.0 * c + d) / (1.0 - c) ** 4
            rate += max(down + shaken, _over(4.0 * self.gradient_drift**2, (2.0 * c - 1.0) * self.gradient_noise**2))
        return rate

    def log_mass(self, initial: float, radius: float, distance: float, time: float) -> float:
        """The logarithm of what is at least left of the ball's mass at a time; initial: the integral of the mollifier
        (64), or half the mass of the ball of half the radius, which is less (fedcb2o.txt (2.21))."""
        return math.log(initial) - self.mass_rate(radius, distance) * time


@dataclass(frozen=True)
class Landscape:
    """The constants of fedcb2o.txt, Assumption 2.1, of a lower level L and an upper level G at the good minimiser."""

    H_L: float  # L - min L <= H_L |x|^h_L within R_LH, A2
    h_L: float
    R_LH: float
    eta_L: float  # the distance to the minimisers <= (L - min L)^nu_L / eta_L where L - min L <= L_inf, A3
    nu_L: float
    L_inf: float
    H_G: float  # G - G* <= H_G |x|^h_G within R_GH, A4
    h_G: float
    R_GH: float
    eta_G: float  # |x| <= (G - G*)^nu_G / eta_G within R_G, and G - G* > G_inf outside of it, A5
    nu_G: float
    R_G: float
    G_inf: float
    K_G: float  # G - G* >= K_G |x|^k_G farther than R_GK, A6
    k_G: float
    R_GK: float


@dataclass(frozen=True)
class Condition:
    """One inequality of a theorem, in words and numbers."""

    what: str
    value: float
    wanted: str
    met: bool


@dataclass(frozen=True)
class Bilevel:
    """Theorem 2.2 for one problem: its constants, the start, the accuracy epsilon, and how many are malicious."""

    setting: Setting  # without gradient terms
    landscape: Landscape
    energy: float  # V of the honest particles at first, half the mean squared distance (2.19)
    mass: Callable[[float], float]  # of the honest start in the ball of a radius around the good minimiser
    accuracy: float  # epsilon
    malicious: float = 0.0  # w_m
    delta_q: float = 0.0

    @property
    def horizon(self) -> float:
        """T* (2.6)."""
        return self.setting.horizon(self.energy, self.accuracy)

    @property
    def largest_delta_q(self) -> float:
        """What delta_q must not exceed; Theorem 2.2 needs it above 0."""
        return 0.5 * self._depth

    @property
    def log_beta_0(self) -> float:
        """The logarithm of beta_0 (2.20); minus infinity if delta_q is too large for there to be one.

        Differs from the paper: p is defined in a work it cites (Prop. 4.4); this is Lemma 5's of fedcbo-jmlr.txt
        without gradients.
        """
        g = self.landscape
        depth = self._depth - self.delta_q  # xi
        radius = min(g.R_LH, (depth / g.H_L) ** (1.0 / g.h_L)) if depth > 0 else 0.0  # r_H
        honest = 0.5 * (1.0 - self.malicious) * self.mass(radius / 2.0) if radius else 0.0
        return math.log(honest) - self._mass_rate(radius) * self.horizon if honest > 0 else -math.inf

    @property
    def alpha_0(self) -> float:
        """(2.23). The remark below Theorem 2.2 adds max(0, log(w_m R / (w_b sqrt eps))) without the factor 1/u that it
        has here; infinite if delta_q = 0, for then no ball around the minimiser is sure to be in the quantile set.

        Differs from the paper: r is defined in a work it cites; this is the largest ball in which A4 promises
        G - G* <= u, within the bounds that Proposition 2.3 sets.
        """
        g, s = self.landscape, self.setting
        u = 0.25 * min((g.eta_G * s.consensus_error * math.sqrt(self.accuracy / 3.0)) ** (1.0 / g.nu_G), self._height)
        sure = (self.delta_q / g.H_L) ** (1.0 / g.h_L)
        radius = min((u / g.H_G) ** (1.0 / g.h_G), g.R_GH, self._near, g.R_LH, sure)
        mass = self.mass(radius / 2.0) if radius > 0 else 0.0
        if not mass > 0:
            return math.inf
        decay = max(0.5, self._mass_rate(radius) / s.rate) * math.log(self.energy / self.accuracy)
        honest = 1.0 - self.malicious
        attack = self.malicious * g.R_GK / (honest * math.sqrt(self.accuracy))
        needed = math.log(12.0 / s.consensus_error) - math.log(mass) + decay + math.log(max(1.0, attack))
        return float(max(1.0 / (g.k_G * g.K_G * g.R_GK**g.k_G), needed / u))

    def conditions(self, alpha: float, beta: float) -> list[Condition]:
        """What Theorem 2.2 wants, and whether a choice has it. One that has not may still work."""
        rate = self.setting.full_rate
        found = [Condition("2 drift - d noise^2", rate, "> 0", rate > 0)]
        if rate > 0:
            most, log_beta, alpha_0 = self.largest_delta_q, self.log_beta_0, self.alpha_0
            found += [
                Condition("delta_q", self.delta_q, f"> 0, <= {most:.3g}", 0 < self.delta_q <= most),
                Condition(
                    "log10 beta", math.log10(beta), f"< {log_beta / math.log(10):.5g}", math.log(beta) < log_beta
                ),
                Condition("alpha", alpha, f"> {alpha_0:.5g}", alpha > alpha_0),
            ]
        return found

    @property
    def _height(self) -> float:
        """G_inf with a tilde, above (2.20)."""
        g = self.landscape
        return float(min(g.G_inf, (g.eta_G * g.R_GK) ** (1.0 / g.nu_G), g.K_G * g.R_GK**g.k_G))

    @property
    def _near(self) -> float:
        """r_G, how near to the minimisers of L the quantile set must be."""
        g = self.landscape
        fine = (g.eta_G * self.setting.consensus_error * math.sqrt(self.accuracy) / 3.0) ** (1.0 / g.nu_G)
        steep = [(bound / (2.0 * g.H_G)) ** (1.0 / g.h_G) for bound in (fine, self._height)]
        return float(min(*steep, g.R_G, g.R_GH, g.R_GK))

    @property
    def _depth(self) -> float:
        g = self.landscape
        return float(min(g.L_inf, (g.eta_L * self._near) ** (1.0 / g.nu_L)))

    def _mass_rate(self, radius: float) -> float:
        return self.setting.mass_rate(radius, self.setting.consensus_error * math.sqrt(self.energy))


def clustered_condition(setting: Setting) -> Condition:
    """What fedcbo-jmlr.txt Theorem 3 wants of the dynamics beside large alpha."""
    rate = setting.full_rate
    return Condition("2 drift - 2 gradient_drift M - d noise^2 - d gradient_noise^2 M^2", rate, "> 0", rate > 0)


def _over(above: float, below: float) -> float:
    """A quotient that is infinite where nothing below is left, and 0 where nothing above is."""
    return above / below if below > 0 else (math.inf if above > 0 else 0.0)
