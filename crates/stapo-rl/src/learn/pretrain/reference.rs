//! Log-probs of a frozen reference: those of the base under new adapters, or stored before the first step.

use super::sequence::TextSequence;
use crate::error::{Error, Result};
use crate::learn::scoring::{ResponseScores, Sequence, score_by};
use crate::policy::loaded::LoadedModel;
use crate::ranks::Solo;
use crate::run::disk::{sha256_hex, write_whole};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use stapo_core::batch::Packing;
use stapo_model::decoder::{HeadOptions, Pass};
use stapo_model::read_f32;
use std::fs;
use std::path::Path;

/// The file in the run folder, and the key of its hash in the loop state, which checkpoints seal.
const FILE: &str = "reference.safetensors";
pub(super) const KEY: &str = "reference_sha256";

/// What losses read of a preference never have gradients by entropy.
pub(super) const OPTIONS: HeadOptions =
    HeadOptions { temperature: 1.0, n_alternatives: 0, has_entropy_gradient: false };

/// The stored log-probs of all learned tokens, row after row.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Stored {
    logp: Vec<f32>,
    /// Where each row begins, and the end of the last.
    starts: Vec<usize>,
}

/// Whose scores are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scorer {
    Policy,
    /// The policy without its adapters.
    Base,
}

/// The scores of sequences, in order.
pub(super) fn scores(
    pass: &mut Pass,
    model: &LoadedModel,
    scorer: Scorer,
    limit: usize,
    sequences: &[&TextSequence],
) -> Result<Vec<ResponseScores>> {
    let marked: Vec<Sequence> = sequences.iter().map(|sequence| Sequence::from(*sequence)).collect();
    score_by(Packing::whole(limit), OPTIONS, &*Solo::ranks(), &marked, |batch, options| match scorer {
        Scorer::Policy => pass.start_score(&model.policy, batch, options),
        Scorer::Base => pass.start_score_base(&model.policy, batch, options),
    })
}

impl Stored {
    /// Adds the log-probs of the next row, those of its sequences one after another.
    pub(super) fn push(&mut self, row: &[ResponseScores]) {
        if self.starts.is_empty() {
            self.starts.push(0);
        }
        // The model computed f32, so that nothing is lost.
        self.logp.extend(row.iter().flat_map(|scores| &scores.logp).map(|&logp| logp as f32));
        self.starts.push(self.logp.len());
    }

    /// The log-probs of a row, cut by the sequences of the row.
    pub(super) fn row(&self, row_idx: usize, sequences: &[TextSequence]) -> Vec<Vec<f64>> {
        let mut row = &self.logp[self.starts[row_idx]..self.starts[row_idx + 1]];
        let mut cut = Vec::with_capacity(sequences.len());
        for sequence in sequences {
            let n_learned = sequence.is_learned.iter().filter(|is_learned| **is_learned).count();
            let (first, rest) = row.split_at_checked(n_learned).unwrap_or((row, &[]));
            cut.push(first.iter().copied().map(f64::from).collect());
            row = rest;
        }
        cut
    }

    /// Writes the file of a run folder and returns its hash.
    pub(super) fn write(&self, folder: &Path) -> Result<String> {
        let logp: Vec<u8> = self.logp.iter().flat_map(|value| value.to_le_bytes()).collect();
        let starts: Vec<u8> = self.starts.iter().flat_map(|&start| (start as u64).to_le_bytes()).collect();
        let view = |dtype, n: usize, bytes| {
            TensorView::new(dtype, vec![n], bytes).expect("the bytes of as many numbers")
        };
        let tensors = [
            ("logp", view(Dtype::F32, self.logp.len(), &logp)),
            ("row_starts", view(Dtype::U64, self.starts.len(), &starts)),
        ];
        let bytes = serialize(tensors, None).map_err(|error| refusal(folder, &error.to_string()))?;
        write_whole(&folder.join(FILE), &bytes)?;
        Ok(sha256_hex(&bytes))
    }

    /// Reads the file of a run folder, which must have the hash that the checkpoint sealed and `n_rows` rows.
    pub(super) fn read(folder: &Path, sha256: Option<&str>, n_rows: usize) -> Result<Self> {
        let path = folder.join(FILE);
        let bytes = fs::read(&path).map_err(|error| Error::io(&path, error))?;
        if sha256 != Some(sha256_hex(&bytes).as_str()) {
            return Err(refusal(folder, "is not the file that the run wrote before its first step"));
        }
        let unreadable = |error: safetensors::SafeTensorError| refusal(folder, &error.to_string());
        let tensors = SafeTensors::deserialize(&bytes).map_err(unreadable)?;
        let starts = tensors.tensor("row_starts").map_err(unreadable)?;
        let starts: Vec<usize> = starts
            .data()
            .chunks_exact(8)
            .map(|chunk| u64::from_le_bytes(chunk.try_into().expect("8 bytes")) as usize)
            .collect();
        let mut logp = vec![0.0; starts.last().copied().unwrap_or(0)];
        let tensor = tensors.tensor("logp").map_err(unreadable)?;
        if starts.len() != n_rows + 1 || !starts.is_sorted() || tensor.data().len() != 4 * logp.len() {
            return Err(refusal(folder, &format!("does not have the log-probs of {n_rows} rows")));
        }
        read_f32(tensor.data(), &mut logp);
        Ok(Self { logp, starts })
    }
}

fn refusal(folder: &Path, problem: &str) -> Error {
    Error::NoRun {
        folder: folder.to_owned(),
        problem: format!("{FILE} {problem}"),
        remedy: "put the file back; the weights that computed it have changed since, so it cannot be computed again"
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_other_rows_or_other_lengths_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let read = |starts: &[usize], n_logp: usize, n_rows: usize| {
            let stored = Stored { logp: vec![-0.5; n_logp], starts: starts.to_vec() };
            let sha256 = stored.write(folder.path()).unwrap();
            let read = Stored::read(folder.path(), Some(&sha256), n_rows);
            assert!(read.as_ref().map_or(true, |read| *read == stored));
            read.map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(read(&[0, 2, 5], 5, 2), Ok(()));
        assert_eq!(read(&[0, 2, 2], 2, 2), Ok(()));
        for (starts, n_logp, n_rows) in [
            (&[0, 2, 5][..], 5, 1),
            (&[0, 2, 5], 5, 3),
            (&[0, 7, 5], 5, 2),
            (&[0, 2, 5], 4, 2),
            (&[0, 2, 5], 6, 2),
        ] {
            let said = read(starts, n_logp, n_rows).unwrap_err();
            assert!(said.contains(&format!("does not have the log-probs of {n_rows} rows")), "{said}");
        }
        let stored = Stored { logp: vec![], starts: vec![0] };
        stored.write(folder.path()).unwrap();
        for sha256 in [None, Some("0")] {
            let said = Stored::read(folder.path(), sha256, 0).unwrap_err().to_string();
            assert!(said.contains("is not the file that the run wrote"), "{said}");
        }
    }
}
