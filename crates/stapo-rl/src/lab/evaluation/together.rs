//! One evaluation on several ranks: each samples its share of the questions, and rank 0 takes the judged samples of all as
//! they come. Rank 0 alone decides when all stop.

use super::{EvalEvent, Evaluation};
use crate::error::Result;
use crate::ranks::wire::{Malformed, Packer, Unpacker};
use crate::ranks::{RankError, Transport, fail_on_all_ranks};
use stapo_core::record::{self, EvalRecord, Record};
use stapo_model::cuda;
use stapo_model::generate::EngineMemory;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::Duration;

/// What ranks send each other in an evaluation.
enum Message {
    /// To rank 0: a judged sample.
    Finished(Box<EvalRecord>),
    /// To rank 0: the signal of that number asked this rank to stop.
    Asked(i32),
    /// To rank 0: this rank has no more samples. From rank 0: all is done.
    End,
    /// From rank 0: stop.
    Stop,
}

impl Message {
    fn to_bytes(&self) -> Vec<u8> {
        let mut packer = Packer::default();
        match self {
            Message::Finished(record) => {
                packer.byte(0);
                packer.text(&record.to_line());
            }
            Message::Asked(signal) => {
                packer.byte(1);
                packer.number(usize::try_from(*signal).unwrap_or_default());
            }
            Message::End => packer.byte(2),
            Message::Stop => packer.byte(3),
        }
        packer.0
    }

    fn read(bytes: &[u8]) -> std::result::Result<Self, Malformed> {
        let mut read = Unpacker(bytes);
        Ok(match read.byte()? {
            0 => {
                let lines = record::parse_lines(&read.text()?).map_err(|_| Malformed)?;
                Message::Finished(Box::new(lines.records.into_iter().next().ok_or(Malformed)?))
            }
            1 => Message::Asked(i32::try_from(read.number()?).map_err(|_| Malformed)?),
            2 => Message::End,
            3 => Message::Stop,
            _ => return Err(Malformed),
        })
    }

    fn receive(ranks: &dyn Transport, from: usize) -> std::result::Result<Self, RankError> {
        let bytes = ranks.receive(from)?;
        let unreadable = |Malformed| ranks.fail(&format!("rank {from} sent a message that cannot be read"));
        Self::read(&bytes).map_err(unreadable)
    }
}

/// How long rank 0 waits for a message before it looks for a signal again.
const PAUSE: Duration = Duration::from_millis(50);

type Told = std::result::Result<Message, RankError>;

impl Evaluation<'_> {
    /// As [`Evaluation::run`], shared out to all ranks: rank 0 takes the samples of all, the others take nothing. `asked`
    /// gives the number of the signal that asked this process to stop. Returns the signal that ended the evaluation on
    /// any rank, on rank 0; `None` if all is done.
    pub fn run_on(
        &self,
        ranks: &dyn Transport,
        memory: &mut EngineMemory,
        asked: &dyn Fn() -> Option<i32>,
        mut take: impl FnMut(EvalEvent) -> Result<()>,
    ) -> Result<Option<i32>> {
        if ranks.world() == 1 {
            self.run(memory, |event| {
                take(event)?;
                Ok(asked().is_none())
            })?;
            return Ok(asked());
        }
        if ranks.rank() > 0 {
            return self.follow(ranks, memory, asked);
        }
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            for rank in 1..ranks.world() {
                let tell = Sender::clone(&tell);
                scope.spawn(move || listen(ranks, rank, &tell));
            }
            drop(tell);
            let mut lead = Lead { ranks, take: &mut take, n_at_work: ranks.world() - 1, signal: None };
            // An error ends the connections, and with them the threads that listen.
            guarded(ranks, || lead.run(self, memory, asked, &told))
        })
    }

    /// The part of every rank but the first.
    fn follow(
        &self,
        ranks: &dyn Transport,
        memory: &mut EngineMemory,
        asked: &dyn Fn() -> Option<i32>,
    ) -> Result<Option<i32>> {
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let listening = scope.spawn(|| {
                let last = Message::receive(ranks, 0);
                is_over.store(true, Ordering::SeqCst);
                last.map(|_| ())
            });
            let mut has_told = false;
            let take = |event| {
                if let EvalEvent::Finished(record) = event {
                    ranks.send(0, Message::Finished(record).to_bytes());
                }
                if let Some(signal) = asked().filter(|_| !has_told) {
                    ranks.send(0, Message::Asked(signal).to_bytes());
                    has_told = true;
                }
                Ok(!has_told && !is_over.load(Ordering::SeqCst))
            };
            guarded(ranks, || self.run(memory, take))?;
            ranks.send(0, Message::End.to_bytes());
            listening.join().expect("receiving does not panic")?;
            Ok(asked())
        })
    }
}

/// Does the work of this rank. An error becomes that of all ranks, a GPU that is lost too.
fn guarded<T>(ranks: &dyn Transport, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = cuda::guard(work).unwrap_or_else(|lost| Err(ranks.fail(&lost.to_string()).into()));
    fail_on_all_ranks(ranks, outcome)
}

/// Passes on what a rank sends, until its end.
fn listen(ranks: &dyn Transport, rank: usize, tell: &Sender<Told>) {
    loop {
        let message = Message::receive(ranks, rank);
        let is_last = matches!(message, Ok(Message::End) | Err(_));
        if tell.send(message).is_err() || is_last {
            return;
        }
    }
}

/// Rank 0 during an evaluation.
struct Lead<'a, F> {
    ranks: &'a dyn Transport,
    take: &'a mut F,
    /// Other ranks that have not yet reported that they are done.
    n_at_work: usize,
    /// What ends the evaluation before all is done.
    signal: Option<i32>,
}

impl<F: FnMut(EvalEvent) -> Result<()>> Lead<'_, F> {
    fn run(
        &mut self,
        evaluation: &Evaluation,
        memory: &mut EngineMemory,
        asked: &dyn Fn() -> Option<i32>,
        told: &Receiver<Told>,
    ) -> Result<Option<i32>> {
        evaluation.run(memory, |event| {
            (self.take)(event)?;
            told.try_iter().try_for_each(|message| self.hear(message))?;
            self.heed(asked());
            Ok(self.signal.is_none())
        })?;
        while self.n_at_work > 0 {
            self.heed(asked());
            match told.recv_timeout(PAUSE) {
                Ok(message) => self.hear(message)?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        if self.signal.is_none() {
            self.tell_all(&Message::End);
        }
        Ok(self.signal)
    }

    fn hear(&mut self, message: Told) -> Result<()> {
        match message? {
            Message::Finished(record) => (self.take)(EvalEvent::Finished(record))?,
            Message::Asked(signal) => self.heed(Some(signal)),
            Message::End | Message::Stop => self.n_at_work -= 1,
        }
        Ok(())
    }

    /// The first signal stops all ranks.
    fn heed(&mut self, signal: Option<i32>) {
        if self.signal.is_none() && signal.is_some() {
            self.signal = signal;
            self.tell_all(&Message::Stop);
        }
    }

    fn tell_all(&self, message: &Message) {
        (1..self.ranks.world()).for_each(|rank| self.ranks.send(rank, message.to_bytes()));
    }
}
