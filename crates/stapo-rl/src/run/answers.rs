//! `answers.journal`: what the environment has answered in steps that are not recorded yet, so that a resumed run asks
//! nothing twice. Each line is a SHA-256 and the JSON that it is the hash of. Lines are not synced: they survive a kill, and the
//! end of the machine costs no more than asking again.

use super::disk::{Appended, remove_file, sha256_hex, write_whole};
use super::reading::{part_files, records_of_file, step_of};
use crate::error::{Error, Result};
use stapo_core::record::{self, EpisodeRecord, Record};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

const ANSWERS: &str = "answers.journal";

/// The key under which a line says how many turns of its episode earlier lines have.
const AFTER_TURNS: &str = "after_turns";

/// The journal of a run, which exists while a step is being made.
#[derive(Debug)]
pub struct AnswerJournal {
    path: PathBuf,
    /// `None` before the first answer of a step.
    lines: Option<Appended>,
    /// The latest step of a line.
    last_step: u64,
}

impl AnswerJournal {
    pub fn open(folder: &Path) -> Result<Self> {
        let last_step = read(folder)?.iter().map(|record| record.step).max().unwrap_or(0);
        Ok(Self { path: folder.join(ANSWERS), lines: None, last_step })
    }

    /// Adds turns of an episode, of which earlier lines have the first `after_turns`.
    pub fn add(&mut self, mut record: EpisodeRecord, after_turns: usize) -> Result<()> {
        record.extra.insert(AFTER_TURNS.to_string(), after_turns.into());
        let lines = match &mut self.lines {
            Some(lines) => lines,
            none => none.insert(Appended::open(&self.path)?),
        };
        self.last_step = self.last_step.max(record.step);
        lines.add(line(&record).as_bytes())
    }

    /// Forgets the answers up to a step, whose records are on disk.
    pub fn forget(&mut self, step: u64) -> Result<()> {
        self.lines = None;
        if !self.path.exists() {
            return Ok(());
        }
        if self.last_step <= step {
            return remove_file(&self.path);
        }
        let mut later = read(self.path.parent().unwrap_or(Path::new("")))?;
        later.retain(|record| record.step > step);
        write(&self.path, &later)
    }
}

/// The answers that a run which is going on from `step` has recorded, in its journal and in the records of later steps.
pub fn recorded_answers(folder: &Path, step: u64) -> Result<Vec<EpisodeRecord>> {
    let mut answers = read(folder)?;
    for file in part_files(folder, "episodes")?.iter().filter(|file| step_of(file) >= Some(step)) {
        answers.extend(records_of_file::<EpisodeRecord>(file)?);
    }
    Ok(answers)
}

/// Moves the answers of steps after `step`, whose records are about to be removed, into the journal; or removes the journal.
pub(super) fn carry_over(folder: &Path, step: u64, keeps: bool) -> Result<()> {
    let path = folder.join(ANSWERS);
    let answers = if keeps { recorded_answers(folder, step + 1)? } else { Vec::new() };
    match (answers.is_empty(), path.exists()) {
        (false, _) => write(&path, &answers),
        (true, true) => remove_file(&path),
        (true, false) => Ok(()),
    }
}

fn line(record: &EpisodeRecord) -> String {
    let json = record.to_line();
    format!("{} {json}", sha256_hex(json.trim_end().as_bytes()))
}

fn write(path: &Path, records: &[EpisodeRecord]) -> Result<()> {
    write_whole(path, records.iter().map(line).collect::<String>().as_bytes())
}

/// The episodes of the journal, each with all of its turns. A torn last line is what a killed writer leaves.
fn read(folder: &Path) -> Result<Vec<EpisodeRecord>> {
    let path = folder.join(ANSWERS);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(&path, error)),
    };
    let text = String::from_utf8_lossy(&bytes);
    let mut episodes: BTreeMap<_, EpisodeRecord> = BTreeMap::new();
    for (idx, line) in text.split_inclusive('\n').enumerate().filter(|(_, line)| line.ends_with('\n')) {
        let whole =
            line.trim_end().split_once(' ').filter(|(sha256, json)| sha256_hex(json.as_bytes()) == *sha256);
        let record = whole.and_then(|(_, json)| record::parse::<EpisodeRecord>(json).ok());
        let Some(mut record) = record else {
            return Err(Error::NoRun {
                folder: folder.to_owned(),
                problem: format!("line {} of {ANSWERS} does not have its hash", idx + 1),
                remedy: format!("remove {}, and the environment is asked again", path.display()),
            });
        };
        let after_turns = record.extra.remove(AFTER_TURNS).and_then(|n| n.as_u64()).unwrap_or(0) as usize;
        let key = (record.step, record.evaluation, record.draw, record.problem_idx, record.sample_idx);
        match episodes.get_mut(&key) {
            Some(known) => {
                known.episode.turns.truncate(after_turns);
                known.episode.turns.append(&mut record.episode.turns);
            }
            None => drop(episodes.insert(key, record)),
        }
    }
    Ok(episodes.into_values().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use stapo_core::record::{Extra, SCHEMA};
    use stapo_core::{Episode, EpisodeTurn, Turn};

    fn answered(step: u64, sample_idx: usize, text: &str) -> EpisodeRecord {
        let turn = EpisodeTurn {
            text_sha256: sha256_hex(text.as_bytes()),
            calls: Vec::new(),
            observations: vec![Turn { role: "user".into(), content: text.into() }],
            n_cut: 0,
            reward: 0.0,
            judged: Vec::new(),
            returns: Vec::new(),
        };
        EpisodeRecord {
            schema: SCHEMA,
            step,
            evaluation: false,
            draw: 0,
            problem_idx: 0,
            sample_idx,
            problem_id: "a".into(),
            episode: Episode { turns: vec![turn] },
            extra: Extra::new(),
        }
    }

    /// The step, the sample and the observations of every episode in the journal.
    fn found(folder: &Path) -> Vec<(u64, usize, Vec<String>)> {
        let texts = |record: &EpisodeRecord| {
            record.episode.turns.iter().map(|turn| turn.observations[0].content.clone()).collect()
        };
        read(folder).unwrap().iter().map(|record| (record.step, record.sample_idx, texts(record))).collect()
    }

    #[test]
    fn answers_are_kept_until_their_step_is_recorded_and_a_torn_line_is_no_error() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        let mut journal = AnswerJournal::open(at).unwrap();
        journal.forget(0).unwrap();
        for (step, sample, text, after_turns) in
            [(1, 0, "one", 0), (1, 1, "other", 0), (1, 0, "two", 1), (2, 0, "late", 0)]
        {
            journal.add(answered(step, sample, text), after_turns).unwrap();
        }
        let other = (1, 1, vec!["other".to_string()]);
        let late = (2, 0, vec!["late".to_string()]);
        assert_eq!(found(at), [(1, 0, vec!["one".into(), "two".into()]), other, late.clone()]);
        let path = at.join(ANSWERS);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, [&whole[..], &whole[..whole.len() / 5]].concat()).unwrap();
        assert_eq!(found(at).len(), 3, "a torn line hides the others");
        carry_over(at, 0, true).unwrap();
        let mut journal = AnswerJournal::open(at).unwrap();
        journal.add(answered(1, 1, "more"), 1).unwrap();
        assert_eq!(found(at)[1].2, ["other", "more"]);
        journal.forget(1).unwrap();
        assert_eq!(found(at), [late]);
        journal.forget(2).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_changed_line_is_refused_by_its_number() {
        let folder = tempfile::tempdir().unwrap();
        let mut journal = AnswerJournal::open(folder.path()).unwrap();
        journal.add(answered(1, 0, "one"), 0).unwrap();
        journal.add(answered(1, 1, "two"), 0).unwrap();
        let path = folder.path().join(ANSWERS);
        fs::write(&path, fs::read_to_string(&path).unwrap().replace("one", "own")).unwrap();
        let error = read(folder.path()).unwrap_err().to_string();
        assert!(error.contains("line 1 of answers.journal") && error.contains("asked again"), "{error}");
        carry_over(folder.path(), 0, false).unwrap();
        assert!(!path.exists());
    }
}
