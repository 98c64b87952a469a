//! The adapter that a model is opened with: a new one, one from a folder in PEFT's format, or that of a run.

use crate::error::{Error, Result};
use crate::plan::config::LoraConfig;
use stapo_model::ModelConfig;
use stapo_model::decoder::{LoraSpec, LoraTarget, Policy};
use stapo_model::peft::PeftAdapter;
use std::path::Path;

/// What a model is opened for.
pub(crate) enum Adapting {
    /// As it is: a run's adapters stay.
    AsFound,
    /// To train: all weights, or the adapters of a config, new ones drawn by the seed.
    Training(Option<LoraConfig>, u64),
    /// With an adapter instead of none.
    With(Box<PeftAdapter>),
}

/// The adapters of a policy that is being made, and what they start as.
pub(crate) struct Adapters {
    pub spec: Option<LoraSpec>,
    start: Start,
}

enum Start {
    /// The checkpoint has them, or there are none.
    Restored,
    Drawn {
        seed: u64,
    },
    Read(Box<PeftAdapter>),
}

impl Adapters {
    /// The adapters of the model `name`, which was found with the adapters `found`.
    pub fn for_model(name: &str, found: Option<&LoraSpec>, adapting: Adapting) -> Result<Self> {
        let refuse = |problem: &str| {
            let remedy = "export the run with stapo export --merge, and name that folder".to_string();
            Err(Error::no_model(name, problem.to_string(), remedy))
        };
        match (found, adapting) {
            (found, Adapting::AsFound) => Ok(Self { spec: found.cloned(), start: Start::Restored }),
            (None, Adapting::With(adapter)) => {
                Ok(Self { spec: Some(adapter.spec.clone()), start: Start::Read(adapter) })
            }
            (Some(_), Adapting::With(_)) => {
                refuse("has adapters already, which a second adapter cannot join")
            }
            (None, Adapting::Training(None, _)) => Ok(Self { spec: None, start: Start::Restored }),
            (None, Adapting::Training(Some(mut lora), seed)) => {
                let start = match pin(&mut lora)? {
                    Some(adapter) => Start::Read(Box::new(adapter)),
                    None => Start::Drawn { seed },
                };
                Ok(Self { spec: Some(lora.spec()), start })
            }
            (Some(found), Adapting::Training(Some(lora), _))
                if lora.adapter.is_none() && lora.spec() == *found =>
            {
                Ok(Self { spec: Some(found.clone()), start: Start::Restored })
            }
            (Some(_), Adapting::Training(..)) => {
                refuse("is a run with adapters, which only a run with the same model.lora can continue")
            }
        }
    }

    /// Refuses an adapter that does not fit the model, before memory is asked for.
    pub fn check(&self, config: &ModelConfig) -> Result<()> {
        match &self.start {
            Start::Read(adapter) => Ok(adapter.check(config)?),
            Start::Restored | Start::Drawn { .. } => Ok(()),
        }
    }

    /// Gives a policy without a checkpoint's adapters the values they start with.
    pub fn start(&self, policy: &mut Policy) -> Result<()> {
        match &self.start {
            Start::Restored => Ok(()),
            Start::Drawn { seed } => {
                policy.start_adapters(*seed);
                Ok(())
            }
            Start::Read(adapter) => Ok(adapter.read_into(policy)?),
        }
    }
}

/// An adapter in PEFT's format, to read responses with and not to train.
pub(crate) fn open(folder: &Path) -> Result<Adapting> {
    Ok(Adapting::With(Box::new(read(folder)?)))
}

/// The adapter of a folder; a folder that holds none is refused with the way to make one.
fn read(folder: &Path) -> Result<PeftAdapter> {
    if !folder.join("adapter_config.json").exists() {
        let shown = folder.display();
        let problem = "has no adapter_config.json, so it is no adapter in PEFT's format".to_string();
        let remedy = if folder.join("plan.toml").exists() {
            format!("export the run first (stapo export {shown} --out DIR), or use --model {shown}")
        } else {
            "name a folder that stapo export RUN --out DIR wrote; --model RUN takes a run as it is"
                .to_string()
        };
        return Err(Error::no_model(&shown.to_string(), problem, remedy));
    }
    Ok(PeftAdapter::open(folder)?)
}

/// Opens the folder of a config's `adapter`, and writes out all keys. Keys that differ from the folder's, and an adapter
/// that was trained with dropout, are refused.
pub(crate) fn pin(lora: &mut LoraConfig) -> Result<Option<PeftAdapter>> {
    let Some(adapter) = lora.adapter.as_deref().map(read).transpose()? else {
        lora.write_out(lora.spec());
        return Ok(None);
    };
    let spec = &adapter.spec;
    let names = |targets: &[LoraTarget]| targets.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ");
    let given = lora.targets.as_ref().map(|targets| names(&targets.0));
    let pairs = [
        ("model.lora.rank", lora.rank.map(|rank| rank.to_string()), spec.rank.to_string()),
        ("model.lora.alpha", lora.alpha.map(|alpha| alpha.to_string()), spec.alpha.to_string()),
        ("model.lora.scale", lora.scale.map(|scale| format!("{scale:?}")), format!("{:?}", spec.scale)),
        ("model.lora.targets", given, names(&spec.targets)),
    ];
    for (key, given, found) in pairs {
        if let Some(given) = given.filter(|given| *given != found) {
            let problem = format!("{given}, and the adapter that the run starts from has {found}");
            return Err(Error::Misfit { key, problem, remedy: "leave it out" });
        }
    }
    if adapter.dropout > 0.0 {
        return Err(Error::Misfit {
            key: "model.lora.adapter",
            problem: format!(
                "was trained with lora_dropout {}, and this program has no dropout",
                adapter.dropout
            ),
            remedy: "set lora_dropout to 0 in its adapter_config.json to train on without dropout",
        });
    }
    lora.write_out(adapter.spec.clone());
    Ok(Some(adapter))
}
