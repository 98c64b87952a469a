//! Which command a file of settings is written for. A file for another command is refused as that, not by the first of
//! its keys that is unknown.

use stapo_core::settings::SettingsError;
use toml::Table;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileKind {
    Training,
    Supervised,
    Experiment,
}

impl FileKind {
    const ALL: [Self; 3] = [Self::Training, Self::Supervised, Self::Experiment];

    /// Keys at the top of a file that files of no other kind have.
    fn own_keys(self) -> &'static [&'static str] {
        match self {
            Self::Training => &["task", "objective", "rollout", "reward", "rewards", "teacher", "canaries"],
            Self::Supervised => &["data", "texts", "loss_on", "epochs", "preference", "reward_model"],
            Self::Experiment => &["arms", "seeds", "matrix", "config"],
        }
    }

    fn commands(self) -> &'static str {
        match self {
            Self::Training => "stapo train",
            Self::Supervised => "stapo sft, stapo prefer, stapo rm and stapo pretrain",
            Self::Experiment => "stapo experiment",
        }
    }

    /// The key by which a file is known to be of this kind.
    pub(crate) fn key_in(self, given: &Table) -> Option<&'static str> {
        self.own_keys().iter().find(|key| given.contains_key(**key)).copied()
    }

    /// Refuses a file that has keys of another kind and none of this one's own. `root` begins the path in the message.
    pub fn check(self, root: &str, given: &Table) -> Result<(), SettingsError> {
        if self.key_in(given).is_some() {
            return Ok(());
        }
        let mut others = Self::ALL.into_iter().filter(|kind| *kind != self);
        match others.find_map(|kind| Some((kind, kind.key_in(given)?))) {
            None => Ok(()),
            Some((other, key)) => Err(SettingsError::Unreadable {
                path: format!("{root}.{key}"),
                problem: format!("a key of files for {}", other.commands()),
                suggestion: format!(
                    "this command reads files for {}; give this one to {}",
                    self.commands(),
                    other.commands().replace(" and ", " or ")
                ),
            }),
        }
    }
}
