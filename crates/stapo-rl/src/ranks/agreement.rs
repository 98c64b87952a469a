//! What must be the same on all ranks: the plan, the program, the libraries, the data and the weights. A difference stops
//! all of them before the first step, and names the rank and the thing.

use super::wire::{Malformed, Packer, Unpacker};
use crate::error::Error;
use stapo_core::record::FileHash;
use stapo_model::ranks::{RankError, Transport};

/// A thing by its name, and its value as a reader sees it.
pub type Fact = (String, String);

/// Compares the facts of all ranks with those of rank 0. Every rank finds the same difference.
pub fn agree(ranks: &dyn Transport, facts: &[Fact]) -> Result<(), RankError> {
    let mut packer = Packer::default();
    for (name, value) in facts {
        packer.text(name);
        packer.text(value);
    }
    let all = ranks.all_gather(&packer.0)?;
    let read = |(rank, bytes): (usize, &Vec<u8>)| {
        let unreadable = |Malformed| RankError { rank, problem: "sent facts that cannot be read".into() };
        facts_of(bytes).map_err(unreadable)
    };
    let all = all.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
    let expected = &all[0];
    for (rank, found) in all.iter().enumerate().skip(1) {
        if let Some((name, value, expected)) = difference(found, expected) {
            let problem = format!(
                "{name} is {value}, and {expected} on rank 0\nhint: all ranks start the same program with the same plan, data and model"
            );
            return Err(RankError { rank, problem });
        }
    }
    Ok(())
}

fn facts_of(bytes: &[u8]) -> Result<Vec<Fact>, Malformed> {
    let mut read = Unpacker(bytes);
    let mut facts = Vec::new();
    while !read.is_empty() {
        facts.push((read.text()?, read.text()?));
    }
    Ok(facts)
}

/// The first fact that differs: its name and both values.
fn difference(found: &[Fact], expected: &[Fact]) -> Option<(String, String, String)> {
    let value = |facts: &[Fact], name: &str| {
        let known = facts.iter().find(|(key, _)| key == name);
        known.map_or("absent".to_string(), |(_, value)| value.clone())
    };
    let names = expected.iter().chain(found).map(|(name, _)| name);
    let values = names.map(|name| (name.clone(), value(found, name), value(expected, name)));
    values.into_iter().find(|(_, found, expected)| found != expected)
}

/// Compares the files that the bits of the run depend on.
pub fn agree_on_inputs(ranks: &dyn Transport, inputs: &[FileHash]) -> Result<(), RankError> {
    let facts: Vec<Fact> =
        inputs.iter().map(|input| (format!("input {}", input.name), input.sha256.clone())).collect();
    agree(ranks, &facts)
}

/// An error of this rank becomes that of all ranks.
pub fn fail_on_all_ranks<T>(ranks: &dyn Transport, outcome: Result<T, Error>) -> Result<T, Error> {
    match outcome {
        // Every rank knows of this error already.
        Err(error @ Error::Rank(_)) => Err(error),
        Err(error) if ranks.world() > 1 => Err(ranks.fail(&error.to_string()).into()),
        outcome => outcome,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fact_that_one_side_lacks_differs_and_their_order_does_not_count() {
        let facts = |list: &[(&str, &str)]| -> Vec<Fact> {
            list.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
        };
        let both = facts(&[("seed", "0"), ("steps", "3")]);
        let differ = |found: &[(&str, &str)]| {
            difference(&facts(found), &both).map(|(name, found, expected)| [name, found, expected].join(" "))
        };
        assert_eq!(differ(&[("steps", "3"), ("seed", "0")]), None);
        assert_eq!(differ(&[("seed", "1"), ("steps", "4")]).unwrap(), "seed 1 0", "the first is named");
        assert_eq!(differ(&[("seed", "0")]).unwrap(), "steps absent 3");
        assert_eq!(differ(&[("seed", "0"), ("steps", "3"), ("new", "x")]).unwrap(), "new x absent");
    }
}
