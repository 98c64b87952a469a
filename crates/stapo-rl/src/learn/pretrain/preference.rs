//! Learning from responses that are compared or judged: the derivatives of a preference objective instead of those of
//! next-token training.

use super::config::PretrainConfig;
use super::file_rows::FileRows;
use super::reference::{self, OPTIONS, Scorer, Stored, scores};
use super::rows::TextRow;
use super::sequence::TextSequence;
use super::texts::encoder;
use super::{LearnedBatch, Pretrainer};
use crate::error::{Error, Result};
use crate::learn::scoring::{ResponseScores, Sequence, packed, split};
use crate::policy::loaded::LoadedModel;
use stapo_core::batch::{Packing, pack_in_order};
use stapo_core::objective::Mask;
use stapo_core::preference::{
    Comparison, ComparisonEffect, JudgedResponse, PreferenceCalibration, PreferenceLoss, PreferenceSpec, Side,
};
use stapo_core::record::PreferenceMetrics;
use std::path::Path;

/// Where the log-probs of the reference come from.
#[derive(Debug)]
pub(super) enum Reference {
    /// The loss reads none.
    None,
    /// The base, which new adapters leave as it is.
    Base,
    Stored(Stored),
}

/// One row: the responses that are compared or judged, and for KTO the response of another row to this row's prompt.
struct JudgedRow {
    sequences: Vec<TextSequence>,
    other: Option<TextSequence>,
    /// Log-probs of the reference for each sequence and then `other`; empty if the loss reads none.
    reference: Vec<Vec<f64>>,
}

/// Rows whose sequences are scored together before the first step.
const STORED_AT_ONCE: usize = 256;

impl JudgedRow {
    /// The sequences, and then the other row's response.
    fn all(&self) -> impl Iterator<Item = &TextSequence> {
        self.sequences.iter().chain(&self.other)
    }

    /// What the objective reads, from the scores of the sequences.
    fn comparison<'a>(&'a self, scores: &'a [ResponseScores]) -> Comparison<'a> {
        let mut comparison = Comparison::default();
        for (idx, (sequence, scores)) in self.sequences.iter().zip(scores).enumerate() {
            let response = JudgedResponse {
                logp: &scores.logp,
                entropy: &scores.entropy,
                collision: Some(&scores.collision),
                reference_logp: self.reference.get(idx).map(Vec::as_slice),
            };
            match sequence.side {
                Some(Side::Chosen) => comparison.chosen = Some(response),
                _ => comparison.rejected = Some(response),
            }
        }
        comparison
    }
}

impl Pretrainer {
    /// Prepares the reference: computes its log-probs for all rows before the first step and writes them to the run folder,
    /// or reads them where the run continues.
    pub(super) fn open_reference(&mut self, config: &PretrainConfig, folder: &Path) -> Result<()> {
        let Some(spec) = config.preference.as_ref().filter(|spec| spec.loss.reads_reference()) else {
            return Ok(());
        };
        if config.lora.as_ref().is_some_and(|lora| lora.adapter.is_none()) {
            self.reference = Reference::Base;
            return Ok(());
        }
        let n_rows = judged_file(self.texts.file())?.all().0.count();
        if self.learner.counters.step > 0 {
            let sha256 = self.learner.loop_state.get(reference::KEY).map(String::as_str);
            self.reference = Reference::Stored(Stored::read(folder, sha256, n_rows)?);
            return Ok(());
        }
        let mut stored = Stored::default();
        let limit = config.update.microbatch_tokens;
        for first in (0..n_rows).step_by(STORED_AT_ONCE) {
            let idxs: Vec<usize> = (first..n_rows.min(first + STORED_AT_ONCE)).collect();
            let rows = self.judged_rows(spec, limit, &idxs)?;
            let sequences: Vec<&TextSequence> = rows.iter().flat_map(JudgedRow::all).collect();
            let all = scores(&mut self.pass, &self.learner.model, Scorer::Policy, limit, &sequences)?;
            let mut all = all.as_slice();
            for row in &rows {
                let (of_row, rest) = all.split_at(row.all().count());
                stored.push(of_row);
                all = rest;
            }
        }
        let sha256 = stored.write(folder)?;
        self.learner.loop_state.insert(reference::KEY.to_string(), sha256);
        self.reference = Reference::Stored(stored);
        Ok(())
    }

    /// Rows by their index, with the log-probs of the reference where it is stored.
    fn judged_rows(&self, spec: &PreferenceSpec, limit: usize, idxs: &[usize]) -> Result<Vec<JudgedRow>> {
        let file = judged_file(self.texts.file())?;
        idxs.iter()
            .map(|&idx| {
                let model = &self.learner.model;
                let sequences = row_sequences(file, model, idx)?;
                let other = if spec.loss.judges_alone() {
                    // The row before in the file, so that the reference can be stored by row.
                    let (n_learned, n_rows) = (file.all().1, file.all().0.count());
                    let (first, n) =
                        if idx < n_learned { (0, n_learned) } else { (n_learned, n_rows - n_learned) };
                    let before = row_sequences(file, model, first + (idx - first + n - 1) % n)?;
                    Some(mismatched(&sequences[0], &before[0], limit))
                } else {
                    None
                };
                let mut row = JudgedRow { sequences, other, reference: Vec::new() };
                if let Reference::Stored(stored) = &self.reference {
                    let all: Vec<TextSequence> = row.all().cloned().collect();
                    row.reference = stored.row(idx, &all);
                }
                Ok(row)
            })
            .collect()
    }

    /// Adds the log-probs of a base under adapters to rows.
    fn add_base(&mut self, limit: usize, rows: &mut [JudgedRow]) -> Result<()> {
        if !matches!(self.reference, Reference::Base) {
            return Ok(());
        }
        let sequences: Vec<&TextSequence> = rows.iter().flat_map(JudgedRow::all).collect();
        let mut all =
            scores(&mut self.pass, &self.learner.model, Scorer::Base, limit, &sequences)?.into_iter();
        for row in rows {
            let n = row.all().count();
            row.reference = all.by_ref().take(n).map(|scores| scores.logp).collect();
        }
        Ok(())
    }

    /// Forward and backward of the rows of one optimizer step; gradients are un-normalised.
    pub(super) fn learn_preferences(
        &mut self,
        config: &PretrainConfig,
        spec: &PreferenceSpec,
    ) -> Result<LearnedBatch> {
        let limit = config.update.microbatch_tokens;
        let step = self.learner.counters.step + 1;
        let refuse = |source| Error::Objective { step, microbatch: None, source };
        let idxs = self.next_rows(config)?;
        let mut rows = self.judged_rows(spec, limit, &idxs)?;
        self.add_base(limit, &mut rows)?;
        let (baseline, calibration) = self.calibrate(spec, limit, step, &rows)?;
        let row_lengths: Vec<usize> =
            rows.iter().map(|row| row.sequences.iter().map(|s| s.tokens.len()).sum()).collect();
        let mut sums = Sums::default();
        for microbatch in pack_in_order(&row_lengths, limit)? {
            let sequences: Vec<Sequence> = microbatch
                .sequences
                .iter()
                .flat_map(|&idx| &rows[idx].sequences)
                .map(Sequence::from)
                .collect();
            let batch = packed(&sequences, Packing::whole(limit));
            let all = self.pass.forward(&self.learner.model.policy, &batch, OPTIONS)?;
            let mut scores = split(&all, &sequences).into_iter();
            let mut d_logp: Vec<f32> = Vec::with_capacity(batch.n_scored());
            for &idx in &microbatch.sequences {
                let row = &rows[idx];
                let of_row: Vec<ResponseScores> = scores.by_ref().take(row.sequences.len()).collect();
                let comparison = row.comparison(&of_row);
                let effect = spec.evaluate(&calibration, idx, &comparison).map_err(refuse)?;
                sums.add(&spec.loss, &comparison, &effect);
                for sequence in &row.sequences {
                    let side =
                        if sequence.side == Some(Side::Chosen) { &effect.chosen } else { &effect.rejected };
                    d_logp.extend(side.d_logp.iter().map(|&derivative| derivative as f32));
                }
            }
            let d_entropy = vec![0.0; d_logp.len()];
            self.learner.backward(&mut self.pass, Some((&d_logp, &d_entropy)), 1)?;
        }
        let mut preference = sums.metrics();
        preference.baseline = spec.loss.judges_alone().then_some(baseline);
        Ok(LearnedBatch {
            loss: sums.loss,
            entropy_mean: sums.entropy / sums.n_scored.max(1) as f64,
            n_tokens: row_lengths.iter().sum(),
            n_scored: sums.n_scored,
            n_examples: rows.len() as u64,
            scale: 1.0 / sums.n_terms.max(1) as f64,
            preference: Some(preference),
            reward_model: None,
        })
    }

    /// What the objective reads of the whole mini-batch; a scoring pass where it reads more than single comparisons.
    fn calibrate(
        &mut self,
        spec: &PreferenceSpec,
        limit: usize,
        step: u64,
        rows: &[JudgedRow],
    ) -> Result<(f64, PreferenceCalibration)> {
        let refuse = |source| Error::Objective { step, microbatch: None, source };
        let baseline = self.baseline(limit, rows)?;
        if !spec.masks.iter().any(Mask::needs_calibration) {
            return Ok((baseline, spec.calibrate(&[], baseline, step).map_err(refuse)?));
        }
        let scored = self.score_rows(limit, rows)?;
        let comparisons: Vec<Comparison> =
            rows.iter().zip(&scored).map(|(row, scores)| row.comparison(scores)).collect();
        Ok((baseline, spec.calibrate(&comparisons, baseline, step).map_err(refuse)?))
    }

    /// KTO's baseline from the responses of other rows; 0 if rows have none.
    fn baseline(&mut self, limit: usize, rows: &[JudgedRow]) -> Result<f64> {
        let others: Vec<&TextSequence> = rows.iter().filter_map(|row| row.other.as_ref()).collect();
        let scored = scores(&mut self.pass, &self.learner.model, Scorer::Policy, limit, &others)?;
        let references = rows.iter().filter(|row| row.other.is_some()).filter_map(|row| row.reference.last());
        let ratio = |(ours, reference): (&ResponseScores, &Vec<f64>)| {
            ours.logp.iter().zip(reference).map(|(logp, reference)| logp - reference).sum()
        };
        Ok(PreferenceLoss::baseline(&scored.iter().zip(references).map(ratio).collect::<Vec<f64>>()))
    }

    /// The scores of every row's sequences.
    fn score_rows(&mut self, limit: usize, rows: &[JudgedRow]) -> Result<Vec<Vec<ResponseScores>>> {
        let sequences: Vec<&TextSequence> = rows.iter().flat_map(|row| &row.sequences).collect();
        let all = scores(&mut self.pass, &self.learner.model, Scorer::Policy, limit, &sequences)?;
        let mut all = all.into_iter();
        Ok(rows.iter().map(|row| all.by_ref().take(row.sequences.len()).collect()).collect())
    }

    /// The loss and the accuracy of held-out rows, without masks; `None` without such rows.
    pub(super) fn held_out_preference(
        &mut self,
        config: &PretrainConfig,
        spec: &PreferenceSpec,
    ) -> Result<Option<(f64, Option<f64>)>> {
        let limit = config.update.microbatch_tokens;
        let step = self.learner.counters.step;
        let refuse = |source| Error::Objective { step, microbatch: None, source };
        let (n_learned, n_rows) = {
            let (all, n_learned) = judged_file(self.texts.file())?.all();
            (n_learned, all.count())
        };
        if n_learned == n_rows {
            return Ok(None);
        }
        let mut rows = self.judged_rows(spec, limit, &(n_learned..n_rows).collect::<Vec<_>>())?;
        self.add_base(limit, &mut rows)?;
        let scored = self.score_rows(limit, &rows)?;
        let baseline = self.baseline(limit, &rows)?;
        let spec = PreferenceSpec { masks: Vec::new(), ..spec.clone() };
        let calibration = spec.calibrate(&[], baseline, step).map_err(refuse)?;
        let mut sums = Sums::default();
        for (idx, (row, scores)) in rows.iter().zip(&scored).enumerate() {
            let comparison = row.comparison(scores);
            sums.add(
                &spec.loss,
                &comparison,
                &spec.evaluate(&calibration, idx, &comparison).map_err(refuse)?,
            );
        }
        Ok(Some((sums.loss / sums.n_terms.max(1) as f64, sums.metrics().accuracy)))
    }

    /// The indexes of the rows of the next optimizer step.
    pub(super) fn next_rows(&self, config: &PretrainConfig) -> Result<Vec<usize>> {
        let file = judged_file(self.texts.file())?;
        let position = self.learner.counters.position;
        let (mut rows, mut n_tokens) = (Vec::new(), 0);
        while config.update.batch_rows.map_or(n_tokens < config.update.batch_tokens, |n| rows.len() < n) {
            let idx = file.row_idx(config.seed, position + rows.len() as u64);
            n_tokens += file.n_tokens(idx);
            rows.push(idx);
        }
        Ok(rows)
    }
}

/// Refuses texts that do not fit to what the run learns.
pub(super) fn check_texts(config: &PretrainConfig, file: Option<&FileRows>) -> Result<()> {
    let refuse = |key, problem: String, remedy| Err(Error::Misfit { key, problem, remedy });
    let has_margin_field = file.is_some_and(|file| file.spec.margin_field.is_some());
    if has_margin_field && config.reward_model.is_none() {
        return refuse("data.margin_field", "given, and no margin is read".into(), "stapo rm reads margins");
    }
    let n_single = || -> Result<usize> {
        let is_pair = |row: &TextRow| matches!(row, TextRow::Judged { sides, .. } if sides.len() == 2);
        Ok(judged_file(file)?.all().0.filter(|row| !is_pair(row)).count())
    };
    let compares = |n| format!("compares pairs, and {n} rows have a single response with a label");
    match (&config.preference, &config.reward_model) {
        (Some(spec), _) if spec.loss.judges_alone() => judged_file(file).map(drop),
        (Some(_), _) => match n_single()? {
            0 => Ok(()),
            n => refuse(
                "preference.loss.kind",
                compares(n),
                "preference.loss.kind = \"kto\" learns from single responses",
            ),
        },
        (None, Some(_)) => match n_single()? {
            0 => Ok(()),
            n => refuse("reward_model", compares(n), "give rows with chosen and rejected"),
        },
        (None, None) => {
            let is_judged = |file: &FileRows| file.all().0.any(|row| matches!(row, TextRow::Judged { .. }));
            let problem = "has chosen and rejected responses".into();
            let remedy = "stapo prefer and stapo rm learn from them";
            if file.is_some_and(is_judged) { refuse("data", problem, remedy) } else { Ok(()) }
        }
    }
}

pub(super) fn judged_file(file: Option<&FileRows>) -> Result<&FileRows> {
    file.ok_or(Error::Misfit {
        key: "data",
        problem: "a mixture or worked solutions, but preferences come from one source of judged responses"
            .into(),
        remedy: "data.path = FILE, or data.kind = \"solution_pairs\"",
    })
}

/// The sequences of a row. Nothing predicts the first token of a sequence.
pub(super) fn row_sequences(
    file: &FileRows,
    model: &LoadedModel,
    row_idx: usize,
) -> Result<Vec<TextSequence>> {
    let row = file.row_at(row_idx);
    let mut sequences = encoder(model)?.with_arguments(&file.spec).sequences(&[row])?.concat();
    for sequence in &mut sequences {
        sequence.is_learned[0] = false;
    }
    Ok(sequences)
}

/// The prompt of one sequence with the response of another, cut to `limit` tokens.
fn mismatched(asked: &TextSequence, answered: &TextSequence, limit: usize) -> TextSequence {
    let first_learned = |sequence: &TextSequence| {
        sequence.is_learned.iter().position(|&is_learned| is_learned).unwrap_or(sequence.tokens.len())
    };
    let prompt = &asked.tokens[..first_learned(asked)];
    let response = &answered.tokens[first_learned(answered)..];
    let mut tokens = [prompt, response].concat();
    tokens.truncate(limit);
    let is_learned = (0..tokens.len()).map(|idx| idx >= prompt.len().max(1)).collect();
    TextSequence { tokens, is_learned, side: None }
}

/// Sums over comparisons.
#[derive(Default)]
struct Sums {
    loss: f64,
    n_terms: usize,
    n_pairs: usize,
    n_in_order: usize,
    entropy: f64,
    n_scored: usize,
    chosen: SideSums,
    rejected: SideSums,
    n_candidates: usize,
    n_silenced: usize,
}

#[derive(Default)]
struct SideSums {
    n: usize,
    n_tokens: usize,
    reward: f64,
    logp: f64,
}

impl Sums {
    fn add(&mut self, loss: &PreferenceLoss, comparison: &Comparison, effect: &ComparisonEffect) {
        self.loss += effect.loss;
        self.n_terms += comparison.n_terms(loss);
        if comparison.chosen.is_some() && comparison.rejected.is_some() {
            self.n_pairs += 1;
            self.n_in_order += usize::from(effect.chosen.reward > effect.rejected.reward);
        }
        let sides = [
            (&mut self.chosen, comparison.chosen, &effect.chosen),
            (&mut self.rejected, comparison.rejected, &effect.rejected),
        ];
        for (sums, response, effect) in sides {
            let Some(response) = response else { continue };
            sums.n += 1;
            sums.n_tokens += response.logp.len();
            sums.reward += effect.reward;
            sums.logp += response.logp.iter().sum::<f64>();
            self.entropy += response.entropy.iter().sum::<f64>();
            self.n_scored += response.logp.len();
        }
        self.n_candidates += effect.chosen.n_candidates;
        self.n_silenced += effect.chosen.n_silenced;
    }

    fn metrics(&self) -> PreferenceMetrics {
        PreferenceMetrics {
            n_terms: self.n_terms,
            accuracy: (self.n_pairs > 0).then(|| self.n_in_order as f64 / self.n_pairs as f64),
            reward_chosen: self.chosen.reward / self.chosen.n.max(1) as f64,
            reward_rejected: self.rejected.reward / self.rejected.n.max(1) as f64,
            logp_chosen: self.chosen.logp / self.chosen.n_tokens.max(1) as f64,
            logp_rejected: self.rejected.logp / self.rejected.n_tokens.max(1) as f64,
            n_chosen_tokens: self.chosen.n_tokens,
            n_candidates: self.n_candidates,
            n_silenced: self.n_silenced,
            baseline: None,
            eval_accuracy: None,
        }
    }
}
