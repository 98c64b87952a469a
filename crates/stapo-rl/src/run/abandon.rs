//! Abandoning what is being sampled. A sample is a function of its key, so a resumed run samples the same bits again.

use crate::error::{Error, Result};
use crate::ranks::{RankError, Transport};
use std::fmt::{Debug, Formatter};
use std::sync::atomic::{AtomicBool, Ordering};

/// How this process was asked to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StopRequest {
    /// The number of the signal.
    pub signal: i32,
    /// Whether a rollout is abandoned. A request that is not urgent lets the step finish.
    pub is_urgent: bool,
}

/// Looks for a request to stop.
type Look = Box<dyn Fn() -> Option<StopRequest> + Send + Sync>;

/// Says whether a rollout is to be abandoned. As long as this process has not trained, every request counts, because nothing
/// would be lost; afterwards only an urgent one does.
#[derive(Default)]
pub struct Abandon {
    look: Option<Look>,
    has_trained: AtomicBool,
}

impl Debug for Abandon {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Abandon").field("signal", &self.signal()).finish_non_exhaustive()
    }
}

impl Abandon {
    pub fn when(look: impl Fn() -> Option<StopRequest> + Send + Sync + 'static) -> Self {
        Self { look: Some(Box::new(look)), has_trained: AtomicBool::new(false) }
    }

    /// Whether this process has learned from a rollout.
    pub fn has_trained(&self) -> bool {
        self.has_trained.load(Ordering::SeqCst)
    }

    pub(crate) fn set_trained(&self) {
        self.has_trained.store(true, Ordering::SeqCst);
    }

    /// The number of the signal for which this process abandons what it samples. Once there is one, there always is.
    pub fn signal(&self) -> Option<i32> {
        let request = self.look.as_ref()?()?;
        (request.is_urgent || !self.has_trained()).then_some(request.signal)
    }

    /// Lets all ranks continue, or none: fails with [`Error::Abandoned`] where one of them abandons what it samples.
    pub(crate) fn agree(&self, ranks: &dyn Transport) -> Result<()> {
        let signal = self.signal().unwrap_or(0).to_le_bytes();
        let all = if ranks.world() == 1 { vec![signal.to_vec()] } else { ranks.all_gather(&signal)? };
        for (rank, bytes) in all.iter().enumerate() {
            let unreadable = || RankError { rank, problem: "sent a signal that cannot be read".into() };
            let signal = i32::from_le_bytes(bytes.as_slice().try_into().map_err(|_| unreadable())?);
            if signal != 0 {
                return Err(Error::Abandoned { signal });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ranks::Solo;
    use std::sync::Arc;

    #[test]
    fn a_request_abandons_a_rollout_before_training_and_an_urgent_one_always() {
        let is_urgent = Arc::new(AtomicBool::new(false));
        let urgent = Arc::clone(&is_urgent);
        let look = move || Some(StopRequest { signal: 2, is_urgent: urgent.load(Ordering::SeqCst) });
        let abandon = Abandon::when(look);
        assert!(matches!(abandon.agree(&Solo), Err(Error::Abandoned { signal: 2 })));
        abandon.set_trained();
        assert!(abandon.signal().is_none() && abandon.agree(&Solo).is_ok());
        is_urgent.store(true, Ordering::SeqCst);
        assert_eq!(abandon.signal(), Some(2));
        assert_eq!(Abandon::default().signal(), None);
    }
}
