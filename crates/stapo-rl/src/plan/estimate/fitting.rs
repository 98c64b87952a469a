//! What to change so that a run fits a machine's memory.

use crate::plan::config::{BaseStorage, KvMemory, LoraConfig, Plan, RecomputeChoice, States};
use stapo_model::generate::EngineSettings;
use stapo_model::{DeviceName, ModelConfig};

/// A setting and the value with which the run fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub key: &'static str,
    pub value: String,
}

/// Changes with which a run fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remedy {
    /// Empty if the run fits as it is.
    pub changes: Vec<Change>,
    pub peak_bytes: u64,
}

/// The settings that memory depends on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Settings {
    recompute: RecomputeChoice,
    microbatch_tokens: usize,
    kv_mib: KvMemory,
    base: BaseStorage,
    states: States,
}

/// The least that settings can be lowered to.
struct Floor {
    microbatch_tokens: usize,
    kv_mib: usize,
    base: BaseStorage,
    states: States,
}

/// The changes with which a run needs at most `limit` bytes by `peak_bytes`: first those that cost time, the last of them a
/// base that stays quantised where `least_base` says that it can, then 8-bit states, which change results. `None` if no
/// such change suffices.
pub fn remedy(
    plan: &Plan,
    (model, least_base): (&ModelConfig, BaseStorage),
    limit: u64,
    peak_bytes: impl Fn(&Plan) -> u64,
) -> Option<Remedy> {
    let given = Settings::from_plan(plan);
    let floor = Floor::for_plan(plan, model, least_base);
    let fits = |settings: &Settings| peak_bytes(&settings.apply(plan)) <= limit;
    let mut settings = given;
    while !fits(&settings) {
        settings = settings.smaller(&floor)?;
    }
    // The last changes may have made room for what was lowered before.
    let restore: [fn(Settings, Settings) -> Settings; 3] = [
        |now, given| Settings { recompute: given.recompute, ..now },
        |now, given| Settings { kv_mib: given.kv_mib, ..now },
        |now, given| Settings { microbatch_tokens: given.microbatch_tokens, ..now },
    ];
    for restore in restore {
        let restored = restore(settings, given);
        if fits(&restored) {
            settings = restored;
        }
    }
    Some(Remedy { changes: settings.changes(given), peak_bytes: peak_bytes(&settings.apply(plan)) })
}

impl Floor {
    fn for_plan(plan: &Plan, model: &ModelConfig, least_base: BaseStorage) -> Self {
        let rollout = &plan.config.rollout;
        let longest = rollout.max_prompt_tokens + rollout.max_response_tokens;
        let device = plan.device();
        let n_rows = EngineSettings::default().max_rows;
        let sequence = model.sequence_bytes(longest + BLOCK_TOKENS, n_rows, device.compute_bytes());
        Self {
            microbatch_tokens: longest,
            // One sequence of the greatest length, and a block.
            kv_mib: (sequence as usize >> 20) + 1,
            base: least_base,
            // Adapters are refused 8-bit states.
            states: if device == DeviceName::Cpu || plan.config.lora.is_some() {
                States::F32
            } else {
                States::EightBit
            },
        }
    }
}

/// At least the positions in a block of the cache.
const BLOCK_TOKENS: usize = 64;

impl Settings {
    fn from_plan(plan: &Plan) -> Self {
        let config = &plan.config;
        Self {
            recompute: config.update.recompute,
            microbatch_tokens: config.update.microbatch_tokens,
            kv_mib: config.rollout.kv_mib,
            base: config.lora.as_ref().map_or(BaseStorage::default(), LoraConfig::base_storage),
            states: config.update.states,
        }
    }

    fn apply(&self, plan: &Plan) -> Plan {
        let mut plan = plan.clone();
        plan.config.update.recompute = self.recompute;
        plan.config.update.microbatch_tokens = self.microbatch_tokens;
        plan.config.rollout.kv_mib = self.kv_mib;
        plan.config.update.states = self.states;
        if let Some(lora) = &mut plan.config.lora {
            lora.base = Some(self.base);
        }
        plan
    }

    /// The next settings that need less; `None` if none is left.
    fn smaller(self, floor: &Floor) -> Option<Self> {
        let recompute = match self.recompute {
            RecomputeChoice::Nothing => Some(RecomputeChoice::Inputs),
            RecomputeChoice::Inputs => Some(RecomputeChoice::Layers),
            RecomputeChoice::Auto | RecomputeChoice::Layers => None,
        };
        if let Some(recompute) = recompute {
            return Some(Self { recompute, ..self });
        }
        if self.microbatch_tokens > floor.microbatch_tokens {
            let microbatch_tokens = (self.microbatch_tokens / 2).max(floor.microbatch_tokens);
            return Some(Self { microbatch_tokens, ..self });
        }
        if let KvMemory::Mib(mib) = self.kv_mib
            && mib > floor.kv_mib
        {
            return Some(Self { kv_mib: KvMemory::Mib((mib / 2).max(floor.kv_mib)), ..self });
        }
        if self.base != floor.base {
            return Some(Self { base: floor.base, ..self });
        }
        (self.states != floor.states).then_some(Self { states: floor.states, ..self })
    }

    fn changes(self, given: Self) -> Vec<Change> {
        let mut changes = Vec::new();
        if self.recompute != given.recompute {
            let value = match self.recompute {
                RecomputeChoice::Auto => "auto",
                RecomputeChoice::Nothing => "nothing",
                RecomputeChoice::Inputs => "inputs",
                RecomputeChoice::Layers => "layers",
            };
            changes.push(Change { key: "update.recompute", value: value.to_string() });
        }
        if self.microbatch_tokens != given.microbatch_tokens {
            changes
                .push(Change { key: "update.microbatch_tokens", value: self.microbatch_tokens.to_string() });
        }
        if let KvMemory::Mib(mib) = self.kv_mib
            && self.kv_mib != given.kv_mib
        {
            changes.push(Change { key: "rollout.kv_mib", value: mib.to_string() });
        }
        if self.base != given.base {
            changes.push(Change { key: "model.lora.base", value: "quantised".to_string() });
        }
        if self.states != given.states {
            changes.push(Change { key: "update.states", value: "8bit".to_string() });
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::config::Config;

    fn plan() -> Plan {
        let text = r#"
            device = "cuda"
            rollout = { max_prompt_tokens = 1024, max_response_tokens = 3072, kv_mib = 8192 }
            update = { microbatch_tokens = 16384, recompute = "nothing" }
        "#;
        Plan::resolve(Config::from_toml(text, []).unwrap()).unwrap()
    }

    /// Bytes that fall with every setting, so that a limit shows how far settings were lowered.
    fn peak_bytes(plan: &Plan) -> u64 {
        let update = &plan.config.update;
        let recompute = match update.recompute {
            RecomputeChoice::Nothing => 300_000,
            RecomputeChoice::Inputs => 200_000,
            RecomputeChoice::Auto | RecomputeChoice::Layers => 100_000,
        };
        let KvMemory::Mib(kv_mib) = plan.config.rollout.kv_mib else { panic!("the plan gives a number") };
        let states = if update.states == States::F32 { 1_000_000 } else { 500_000 };
        recompute + states + update.microbatch_tokens as u64 + kv_mib as u64
    }

    fn changes(limit: u64) -> Option<Vec<String>> {
        let model = ModelConfig::known("qwen3-1.7b").unwrap();
        let remedy = remedy(&plan(), (&model, BaseStorage::Bf16), limit, peak_bytes)?;
        assert!(remedy.peak_bytes <= limit);
        Some(remedy.changes.into_iter().map(|change| format!("{}={}", change.key, change.value)).collect())
    }

    #[test]
    fn settings_are_lowered_only_as_far_as_the_limit_asks() {
        assert_eq!(changes(2_000_000).unwrap(), [""; 0]);
        assert_eq!(changes(1_230_000).unwrap(), ["update.recompute=inputs"]);
        assert_eq!(changes(1_120_000).unwrap(), ["update.recompute=layers", "update.microbatch_tokens=8192"]);
        assert_eq!(changes(1_110_000).unwrap().last().unwrap(), "rollout.kv_mib=4096");
    }

    #[test]
    fn states_of_8_bits_come_last_and_give_back_what_fits_then() {
        assert_eq!(changes(850_000).unwrap(), ["update.states=8bit"]);
        assert_eq!(changes(630_000).unwrap(), ["update.recompute=layers", "update.states=8bit"]);
        assert_eq!(changes(500_000), None);
    }

    #[test]
    fn adapters_are_given_a_quantised_base_where_it_can_be_had_and_no_states_of_8_bits() {
        let model = ModelConfig::known("qwen3-1.7b").unwrap();
        let mut adapted = plan();
        adapted.config.lora = Some(LoraConfig::default());
        let peak = |plan: &Plan| {
            let base = plan.config.lora.as_ref().unwrap().base_storage();
            peak_bytes(plan) - if base == BaseStorage::Quantised { 400_000 } else { 0 }
        };
        let remedy = |base, limit| remedy(&adapted, (&model, base), limit, peak);
        assert_eq!(remedy(BaseStorage::Bf16, 850_000), None);
        let quantised = remedy(BaseStorage::Quantised, 950_000).unwrap().changes;
        assert_eq!(quantised, [Change { key: "model.lora.base", value: "quantised".into() }]);
        let fits = remedy(BaseStorage::Quantised, 1_230_000).unwrap().changes;
        assert_eq!(fits, [Change { key: "update.recompute", value: "inputs".into() }]);
    }

    #[test]
    fn no_setting_falls_below_what_the_longest_sequence_needs() {
        let model = ModelConfig::known("qwen3-1.7b").unwrap();
        let floor = Floor::for_plan(&plan(), &model, BaseStorage::Bf16);
        assert_eq!(floor.microbatch_tokens, 4096);
        // 114,688 bytes for each of 4,160 keys.
        assert_eq!(floor.kv_mib, 456);
        let mut settings = Settings::from_plan(&plan());
        while let Some(smaller) = settings.smaller(&floor) {
            settings = smaller;
        }
        assert_eq!((settings.microbatch_tokens, settings.kv_mib), (4096, KvMemory::Mib(456)));
    }
}
