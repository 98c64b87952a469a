//! A reader that does not wait for ever.

use std::io::{Error, ErrorKind, Read, Result};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::Duration;

/// Reads `inner` on a separate thread; an error where no byte arrives within `timeout`. The thread of a reader that
/// was given up ends with its connection or with the program.
pub struct TimedReader {
    chunks: Receiver<Result<Vec<u8>>>,
    timeout: Duration,
    current: Vec<u8>,
    n_taken: usize,
}

impl TimedReader {
    pub fn new(mut inner: impl Read + Send + 'static, timeout: Duration) -> Self {
        let (sender, chunks) = sync_channel(4);
        std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 16];
            loop {
                let chunk = inner.read(&mut buffer).map(|n| buffer[..n].to_vec());
                let is_last = !matches!(&chunk, Ok(bytes) if !bytes.is_empty());
                if sender.send(chunk).is_err() || is_last {
                    break;
                }
            }
        });
        Self { chunks, timeout, current: Vec::new(), n_taken: 0 }
    }
}

impl Read for TimedReader {
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        if self.n_taken == self.current.len() {
            self.current = match self.chunks.recv_timeout(self.timeout) {
                Ok(chunk) => chunk?,
                Err(RecvTimeoutError::Disconnected) => Vec::new(),
                Err(RecvTimeoutError::Timeout) => {
                    let problem = format!("no byte for {} s", self.timeout.as_secs());
                    return Err(Error::new(ErrorKind::TimedOut, problem));
                }
            };
            self.n_taken = 0;
        }
        let n = out.len().min(self.current.len() - self.n_taken);
        out[..n].copy_from_slice(&self.current[self.n_taken..self.n_taken + n]);
        self.n_taken += n;
        Ok(n)
    }
}
