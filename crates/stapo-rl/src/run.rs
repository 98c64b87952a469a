//! The run directory: the interface between the trainer and every other command.
//!
//! `config.toml` as written · `plan.toml` resolved · `build.json` · `metrics.jsonl` · `rollouts/` · `tokens/`
//! (silenced) · `explored/` (kept candidates) · `checkpoints/` · `records.jsonl` (hashes) · `events.jsonl` · `answers.journal` (while a
//! step with an environment is made) · `manifest.json` · `manifest.sha256` · `lock`.
//! Every file but `metrics.jsonl`, `records.jsonl`, `events.jsonl`, `answers.journal` and `lock` is written atomically (temporary file,
//! fsync, rename). A line of the first four is one write, and a resume removes a torn last line. A new folder appears as a whole, by one rename.

mod abandon;
mod answers;
pub(crate) mod best;
mod checkpoint;
mod clock;
pub mod columns;
pub mod disk;
pub(crate) mod events;
mod folder;
mod hashes;
mod image;
mod journal;
mod lock;
mod manifest;
pub mod meter;
mod new_folder;
mod parts;
mod plan_keys;
mod reading;
pub mod receipt;
pub(crate) mod records;
mod reopening;
pub mod restart;
mod saving;
mod state;
mod state_hash;
mod tree;

pub use abandon::{Abandon, StopRequest};
pub(crate) use answers::{AnswerJournal, recorded_answers};
pub(crate) use checkpoint::restore;
pub use checkpoint::{Checkpoint, Provenance};
pub use clock::utc;
pub(crate) use events::EventLog;
pub use events::read_events;
pub use folder::Run;
pub(crate) use folder::ToSave;
pub use hashes::{hash_bytes, hash_file};
pub(crate) use image::Image;
pub use lock::{FolderLock, describe as describe_writer, holder, this_process};
pub(crate) use manifest::accepted as accepted_changes;
pub use new_folder::{NewFolder, is_free};
pub(crate) use parts::{Part, PartFiles, PartOrder};
pub use plan_keys::{Freedom, differences as plan_differences, freedom, plan_values};
pub use reading::{
    RunKind, part_files, plan_text, read_columns, records, records_of_file, responses_of_file, step_of,
};
pub use reopening::Reopening;
pub(crate) use saving::has_room_for;
pub use state::{Counters, LoopState};
pub(crate) use state::{check_finite, send_state};
pub(crate) use state_hash::state_hash;
pub use tree::check_tree;

/// True in every `every`-th step; never where `every` is 0.
pub fn is_due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
