//! Refuses impossible and meaningless specs before a run starts, with the reason.

use super::{Advantage, MaskKind, load::SpecError};
use super::{
    Aggregate, Denominator, EntropyBonus, Kl, Mask, ObjectiveSpec, OffPolicy, Ratio, Select, Surrogate,
};

impl ObjectiveSpec {
    /// Checks every value and every combination of axes.
    pub fn check(&self) -> Result<(), SpecError> {
        self.check_advantage()?;
        for (idx, mask) in self.masks.iter().enumerate() {
            check_mask(mask).map_err(|(key, problem)| refuse(&format!("masks.{idx}.{key}"), &problem, ""))?;
        }
        self.check_surrogate()?;
        self.check_ratio()?;
        self.check_aggregate()?;
        self.check_masks_together()?;
        if let Kl::K1 { beta } | Kl::K2 { beta } | Kl::K3 { beta } = self.kl {
            at_least("kl.beta", beta, 0.0)?;
        }
        if let EntropyBonus::Constant { coefficient } = self.entropy_bonus {
            finite("entropy_bonus.coefficient", coefficient)?;
        }
        match self.off_policy {
            OffPolicy::None => Ok(()),
            OffPolicy::Tis { cap } => positive("off_policy.cap", cap),
            OffPolicy::Icepop { low, high } => {
                at_least("off_policy.low", low, 0.0)?;
                ordered("off_policy", low, high)
            }
        }
    }

    fn check_advantage(&self) -> Result<(), SpecError> {
        if let Advantage::GroupZScore { ddof, epsilon } = self.advantage {
            if ddof > 1 {
                return Err(refuse("advantage.ddof", &format!("{ddof}, expected 0 or 1"), ""));
            }
            at_least("advantage.epsilon", epsilon, 0.0)?;
        }
        Ok(())
    }

    fn check_surrogate(&self) -> Result<(), SpecError> {
        match self.surrogate {
            Surrogate::Clip { low, high, dual } => {
                within_unit("surrogate.low", low)?;
                ordered("surrogate", low, high)?;
                match dual {
                    Some(c) if !(c.is_finite() && c > 1.0 + high) => Err(refuse(
                        "surrogate.dual",
                        &format!("{c} is not above 1 + high = {}", 1.0 + high),
                        "dual clip bounds ratios beyond the upper clip; 3 and 10 are the usual values",
                    )),
                    _ => Ok(()),
                }
            }
            Surrogate::Cispo { low, high } => {
                low.map_or(Ok(()), |low| within_unit("surrogate.low", low))?;
                at_least("surrogate.high", high, 0.0)
            }
            Surrogate::KlCov { share, coefficient } => {
                within_unit("surrogate.share", share)?;
                at_least("surrogate.coefficient", coefficient, 0.0)
            }
            Surrogate::Sapo { tau_positive, tau_negative } => {
                positive("surrogate.tau_positive", tau_positive)?;
                positive("surrogate.tau_negative", tau_negative)
            }
            Surrogate::Geometric { clip } => positive("surrogate.clip", clip),
            Surrogate::TotalVariation { delta } => positive("surrogate.delta", delta),
            Surrogate::Reinforce | Surrogate::Unclipped => Ok(()),
        }
    }

    fn check_ratio(&self) -> Result<(), SpecError> {
        let reason = match (self.ratio, self.surrogate) {
            (Ratio::Token, _)
            | (Ratio::Sequence, Surrogate::Clip { .. } | Surrogate::Unclipped | Surrogate::Sapo { .. }) => {
                return Ok(());
            }
            (_, Surrogate::Reinforce) => "reinforce uses no ratio",
            (_, Surrogate::Cispo { .. }) => "cispo weighs each token's own log-prob by its own ratio",
            (_, Surrogate::KlCov { .. }) => "kl_cov penalises tokens by their own ratio",
            (_, Surrogate::Geometric { .. }) => {
                "geometric builds its sequence ratio from clipped token ratios itself"
            }
            (_, Surrogate::TotalVariation { .. }) => {
                "total_variation bounds the move of each token's own probability"
            }
        };
        Err(refuse(
            "ratio.kind",
            &format!("sequence does not go with this surrogate: {reason}"),
            "ratio.kind = \"token\"",
        ))
    }

    fn check_aggregate(&self) -> Result<(), SpecError> {
        match (self.aggregate, self.denominator) {
            (Aggregate::SequenceMeanOfTokenSum, Denominator::Constant { length }) => {
                positive("denominator.length", length)
            }
            (Aggregate::SequenceMeanOfTokenSum, _) => Err(refuse(
                "denominator.kind",
                "sequence_mean_of_token_sum divides by a constant length, not by counted tokens",
                "denominator = { kind = \"constant\", length = … }, or aggregate.kind = \"sequence_mean_of_token_mean\"",
            )),
            (_, Denominator::Constant { .. }) => Err(refuse(
                "denominator.kind",
                "a constant length goes only with aggregate sequence_mean_of_token_sum",
                "aggregate.kind = \"sequence_mean_of_token_sum\"",
            )),
            _ => Ok(()),
        }
    }

    fn check_masks_together(&self) -> Result<(), SpecError> {
        let two_pass = self.masks.iter().filter(|m| m.kind() == MaskKind::LowProbabilityFirst).count();
        if two_pass > 1 {
            return Err(refuse(
                "masks",
                "low_probability_first appears twice; a mini-batch has two passes at most",
                "",
            ));
        }
        Ok(())
    }
}

fn check_mask(mask: &Mask) -> Result<(), (&'static str, String)> {
    let unit = |key, x: f64| in_range(key, x, 0.0, 1.0);
    match *mask {
        Mask::Spurious { tau_p, q, select, .. } => {
            open_unit("tau_p", tau_p)?;
            if select == Select::Full { Ok(()) } else { unit("q", q) }
        }
        Mask::RandomTokens { tau_p, q, .. } => {
            open_unit("tau_p", tau_p)?;
            unit("q", q)
        }
        Mask::TopEntropy { share } => {
            if share > 0.0 && share <= 1.0 {
                Ok(())
            } else {
                Err(("share", format!("{share}, expected a share in (0, 1]")))
            }
        }
        Mask::ClipCov { share, low, high, .. } => {
            unit("share", share)?;
            if low.is_finite() && high > low {
                Ok(())
            } else {
                Err(("high", format!("{high} is not above low {low}")))
            }
        }
        Mask::LowProbabilityFirst { eta } => open_unit("eta", eta),
        Mask::ProbabilityWeight { alpha } => unit("alpha", alpha),
        Mask::Taco { a, l } => {
            unit("l", l)?;
            if a.is_finite() && a > 0.0 {
                Ok(())
            } else {
                Err(("a", format!("{a}, expected a positive number")))
            }
        }
    }
}

fn in_range(key: &'static str, x: f64, low: f64, high: f64) -> Result<(), (&'static str, String)> {
    if (low..=high).contains(&x) {
        Ok(())
    } else {
        Err((key, format!("{x}, expected a number in [{low}, {high}]")))
    }
}

fn open_unit(key: &'static str, x: f64) -> Result<(), (&'static str, String)> {
    if x > 0.0 && x <= 1.0 { Ok(()) } else { Err((key, format!("{x}, expected a probability in (0, 1]"))) }
}

fn refuse(key: &str, problem: &str, remedy: &str) -> SpecError {
    SpecError::Refused { key: key.to_string(), problem: problem.to_string(), remedy: remedy.to_string() }
}

fn finite(key: &str, x: f64) -> Result<(), SpecError> {
    if x.is_finite() { Ok(()) } else { Err(refuse(key, &format!("{x}, expected a finite number"), "")) }
}

fn positive(key: &str, x: f64) -> Result<(), SpecError> {
    if x.is_finite() && x > 0.0 {
        Ok(())
    } else {
        Err(refuse(key, &format!("{x}, expected a positive number"), ""))
    }
}

fn at_least(key: &str, x: f64, low: f64) -> Result<(), SpecError> {
    if x.is_finite() && x >= low {
        Ok(())
    } else {
        Err(refuse(key, &format!("{x}, expected at least {low}"), ""))
    }
}

fn within_unit(key: &str, x: f64) -> Result<(), SpecError> {
    if (0.0..=1.0).contains(&x) {
        Ok(())
    } else {
        Err(refuse(key, &format!("{x}, expected a number in [0, 1]"), ""))
    }
}

fn ordered(axis: &str, low: f64, high: f64) -> Result<(), SpecError> {
    if high.is_finite() && high >= low {
        return Ok(());
    }
    Err(refuse(
        &format!("{axis}.high"),
        &format!("{high} is below low {low}"),
        "the upper bound is the wider one in every published recipe",
    ))
}
