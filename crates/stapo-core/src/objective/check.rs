//! Refuses impossible and meaningless specs before a run starts, with the reason.

use super::{
    Advantage, Aggregate, Denominator, Distillation, EntropyBonus, Kl, Mask, MaskKind, MaskSignals,
    MultipleRewards, ObjectiveSpec, OffPolicy, Ratio, Select, SpecError, Surrogate, Threshold, Whiten, mask,
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
        if let Some(beta) = self.kl.beta() {
            at_least("kl.beta", beta, 0.0)?;
        }
        self.check_entropy_bonus()?;
        match self.off_policy {
            OffPolicy::None => Ok(()),
            OffPolicy::Tis { cap, .. } => positive("off_policy.cap", cap),
            OffPolicy::Icepop { low, high } | OffPolicy::Mis { low, high, .. } => {
                at_least("off_policy.low", low, 0.0)?;
                ordered("off_policy", low, high)
            }
        }
    }

    /// What is unusual about the settings, and allowed: one sentence each.
    pub fn warnings(&self) -> Vec<String> {
        let bounds = match (self.surrogate, self.ratio) {
            (Surrogate::Clip { low, high, .. } | Surrogate::Cispo { low: Some(low), high }, _) => {
                Some(("surrogate", low, high))
            }
            (_, Ratio::Geometric { low, high, .. }) => Some(("ratio", low, high)),
            _ => None,
        };
        let reversed = bounds.filter(|(_, low, high)| high < low);
        let text = reversed.map(|(axis, low, high)| {
            format!(
                "objective.{axis}.high {high} is below low {low}; most recipes have the wider bound above"
            )
        });
        text.into_iter().collect()
    }

    fn check_entropy_bonus(&self) -> Result<(), SpecError> {
        match self.entropy_bonus {
            EntropyBonus::None => Ok(()),
            EntropyBonus::Constant { coefficient } => finite("entropy_bonus.coefficient", coefficient),
            EntropyBonus::Target { target, initial, step, min, max } => {
                at_least("entropy_bonus.target", target, 0.0)?;
                at_least("entropy_bonus.step", step, 0.0)?;
                finite("entropy_bonus.min", min)?;
                ordered_as("entropy_bonus.initial", initial, "min", min)?;
                ordered_as("entropy_bonus.max", max, "initial", initial)
            }
        }
    }

    fn check_advantage(&self) -> Result<(), SpecError> {
        match self.advantage {
            Advantage::GroupZScore { ddof, epsilon } | Advantage::GroupMeanBatchStd { ddof, epsilon } => {
                if ddof > 1 {
                    return Err(refuse("advantage.ddof", &format!("{ddof}, expected 0 or 1"), ""));
                }
                at_least("advantage.epsilon", epsilon, 0.0)?;
            }
            Advantage::Return { gamma } => within_unit("advantage.gamma", gamma)?,
            Advantage::GroupMean
            | Advantage::LeaveOneOut
            | Advantage::LengthWeightedMean
            | Advantage::GroupMeanNonzeroShare
            | Advantage::BestAboveSecond => {}
        }
        if let Whiten::Responses { epsilon } | Whiten::Tokens { epsilon } = self.whiten {
            at_least("whiten.epsilon", epsilon, 0.0)?;
        }
        if let Some(beta) = self.kl_in_reward.beta() {
            at_least("kl_in_reward.beta", beta, 0.0)?;
        }
        self.check_distillation()?;
        let is_return = matches!(self.advantage, Advantage::Return { .. });
        if self.multiple_rewards == MultipleRewards::NormalizeEach {
            if is_return {
                let problem = "normalize_each needs an advantage that normalises; return has no baseline";
                return Err(refuse("multiple_rewards", problem, "advantage.kind = \"group_z_score\""));
            }
            if self.kl_in_reward != Kl::None {
                let problem = "KL is part of the one sum of rewards, and normalize_each has no such sum";
                return Err(refuse(
                    "kl_in_reward.kind",
                    problem,
                    "multiple_rewards = \"sum\", or kl instead",
                ));
            }
        }
        if matches!(self.kl_in_reward, Kl::UnbiasedK3 { .. }) {
            let problem = "unbiased_k3 weighs by the ratio, and the ratio at sampling is 1";
            return Err(refuse("kl_in_reward.kind", problem, "kl_in_reward.kind = \"k3\""));
        }
        Ok(())
    }

    fn check_distillation(&self) -> Result<(), SpecError> {
        match self.distillation {
            Distillation::None => Ok(()),
            Distillation::ReverseKl { beta, reward_weight } => {
                finite("distillation.beta", beta)?;
                finite("distillation.reward_weight", reward_weight)
            }
            Distillation::Dasd { beta, quantile, .. } => {
                finite("distillation.beta", beta)?;
                within_unit("distillation.quantile", quantile)
            }
        }
    }

    fn check_surrogate(&self) -> Result<(), SpecError> {
        match self.surrogate {
            Surrogate::Clip { low, high, dual } => {
                within_unit("surrogate.low", low)?;
                at_least("surrogate.high", high, 0.0)?;
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
            Surrogate::TotalVariation { low, high, cap } | Surrogate::BinaryKl { low, high, cap } => {
                positive("surrogate.low", low)?;
                positive("surrogate.high", high)?;
                cap.map_or(Ok(()), |cap| at_least("surrogate.cap", cap, 1.0))
            }
            Surrogate::SquaredLogRatio { beta } => at_least("surrogate.beta", beta, 0.0),
            Surrogate::Vespo { k_positive, lambda_positive, k_negative, lambda_negative } => {
                at_least("surrogate.k_positive", k_positive, 0.0)?;
                positive("surrogate.lambda_positive", lambda_positive)?;
                at_least("surrogate.k_negative", k_negative, 0.0)?;
                positive("surrogate.lambda_negative", lambda_negative)
            }
            Surrogate::Reinforce | Surrogate::Unclipped => Ok(()),
        }
    }

    fn check_ratio(&self) -> Result<(), SpecError> {
        if let Ratio::Geometric { low, high, .. } = self.ratio {
            positive("ratio.low", low)?;
            positive("ratio.high", high)?;
        }
        if let Ratio::Token { max_log_ratio: Some(bound) } = self.ratio {
            positive("ratio.max_log_ratio", bound)?;
            let is_held = matches!(
                self.surrogate,
                Surrogate::Clip { .. } | Surrogate::Unclipped | Surrogate::Cispo { .. }
            );
            if !is_held {
                let problem = "only clip, unclipped and cispo hold log-ratios";
                return Err(refuse("ratio.max_log_ratio", problem, "leave it out"));
            }
        }
        let (ratio, reason) = match (self.ratio, self.surrogate) {
            (Ratio::Product, Surrogate::Vespo { .. }) => return Ok(()),
            (_, Surrogate::Vespo { .. }) => {
                return Err(refuse(
                    "ratio.kind",
                    "vespo weighs a response by the ratio of its whole probabilities",
                    "ratio.kind = \"product\"",
                ));
            }
            (Ratio::Token { .. }, _) => return Ok(()),
            (Ratio::Product, _) => ("product", "only vespo is made for ratios of whole responses"),
            (_, Surrogate::Clip { .. } | Surrogate::Unclipped | Surrogate::Sapo { .. }) => return Ok(()),
            (_, Surrogate::Reinforce) => ("a ratio per response", "reinforce uses no ratio"),
            (_, Surrogate::Cispo { .. }) => {
                ("a ratio per response", "cispo weighs each token's own log-prob by its own ratio")
            }
            (_, Surrogate::KlCov { .. } | Surrogate::SquaredLogRatio { .. }) => {
                ("a ratio per response", "it penalises tokens by their own ratio")
            }
            (_, Surrogate::TotalVariation { .. } | Surrogate::BinaryKl { .. }) => {
                ("a ratio per response", "it bounds the move of each token's own probability")
            }
        };
        Err(refuse(
            "ratio.kind",
            &format!("{ratio} does not go with this surrogate: {reason}"),
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
        if self.reads_collision() && self.mask_signals == MaskSignals::Behavior {
            return Err(refuse(
                "mask_signals",
                "behavior does not go with the threshold influence, whose collision is the current policy's",
                "mask_signals = \"current\"",
            ));
        }
        Ok(())
    }
}

fn check_mask(mask: &Mask) -> Result<(), (&'static str, String)> {
    let unit = |key, x: f64| in_range(key, x, 0.0, 1.0);
    match *mask {
        Mask::Spurious { tau_p, threshold, q, select, .. } => {
            open_unit("tau_p", tau_p)?;
            check_threshold(threshold, tau_p)?;
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
            above("a", a, 0.0)
        }
        Mask::Stare { share, weight, entropy_below, step, min, max, .. } => {
            unit("share", share)?;
            in_range("min", min, 0.0, max)?;
            in_range("weight", weight, min, max)?;
            in_range("entropy_below", entropy_below, 0.0, f64::INFINITY)?;
            in_range("step", step, 0.0, 1.0)?;
            in_range("max", max, 0.0, 2.0)
        }
        Mask::Rsi { low, high } => {
            in_range("low", low, 0.0, f64::MAX)?;
            above("high", high, low)
        }
        Mask::OffPolicySequence { delta } => in_range("delta", delta, 0.0, f64::MAX),
    }
}

fn check_threshold(threshold: Threshold, tau_p: f64) -> Result<(), (&'static str, String)> {
    if threshold != Threshold::TauP && tau_p != mask::PUBLISHED_TAU_P {
        return Err(("tau_p", format!("{tau_p} is read by threshold.kind = \"tau_p\" alone; leave it out")));
    }
    match threshold {
        Threshold::TauP => Ok(()),
        Threshold::TargetShare { share } => in_range("threshold.share", share, 0.0, 1.0),
        Threshold::Surprise { c, b } => {
            in_range("threshold.c", c, 0.0, f64::MAX)?;
            in_range("threshold.b", b, f64::MIN, f64::MAX)
        }
        Threshold::Influence { kappa, vocabulary } => {
            in_range("threshold.kappa", kappa, 0.0, 1.0)?;
            match vocabulary {
                Some(v) if v < 2 => Err(("threshold.vocabulary", format!("{v}, expected at least 2 tokens"))),
                _ => Ok(()),
            }
        }
    }
}

fn above(key: &'static str, x: f64, low: f64) -> Result<(), (&'static str, String)> {
    if x.is_finite() && x > low { Ok(()) } else { Err((key, format!("{x}, expected a number above {low}"))) }
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
    ordered_as(&format!("{axis}.high"), high, "low", low)
}

fn ordered_as(key: &str, high: f64, low_name: &str, low: f64) -> Result<(), SpecError> {
    if high.is_finite() && high >= low {
        return Ok(());
    }
    Err(refuse(key, &format!("{high} is below {low_name} {low}"), ""))
}
