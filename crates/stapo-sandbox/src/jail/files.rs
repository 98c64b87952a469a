//! Access to files, by Landlock: the jail's paths can be read, `/tmp` can be written, and nothing else is there.

use super::Jail;
use crate::Level;
use landlock::{
    ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr,
    RulesetStatus, Scope, path_beneath_rules,
};
use std::path::{Path, PathBuf};

/// Restricts this process and all that it starts; rights that an older kernel does not know are left out.
pub(super) fn restrict(jail: &Jail) -> Result<(), String> {
    let (reads, writes): (Vec<PathBuf>, Vec<&Path>) = match jail.level {
        // The root holds the jail's paths only.
        Level::Namespaces => (vec!["/".into()], vec![Path::new("/tmp")]),
        _ => (jail.reads.clone(), jail.scratch.as_deref().into_iter().collect()),
    };
    let abi = ABI::V5;
    let restricted = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(abi)))
        .and_then(|rules| rules.scope(Scope::from_all(ABI::V6)))
        .and_then(Ruleset::create)
        .and_then(|rules| rules.add_rules(path_beneath_rules(reads, AccessFs::from_read(abi))))
        .and_then(|rules| rules.add_rules(path_beneath_rules(writes, AccessFs::from_all(abi))))
        .and_then(|rules| {
            let null = AccessFs::ReadFile | AccessFs::WriteFile;
            rules.add_rules(path_beneath_rules(["/dev/null"], null))
        })
        .and_then(RulesetCreated::restrict_self)
        .map_err(|error| error.to_string())?;
    match restricted.ruleset {
        RulesetStatus::NotEnforced => Err("this kernel has none".into()),
        _ => Ok(()),
    }
}
