//! Systems other than Linux, whose kernels give an ordinary user no jail.

use crate::{Layers, Outcome, Request, SandboxError, Settings, Tested, Trial};
use std::convert::Infallible;
use std::io;
use std::process::{Command, ExitCode};

pub const SUBCOMMAND: &str = "launch-sandbox";

/// Refuses, since there is nothing to launch.
pub fn launch(_jail: &str) -> ExitCode {
    ExitCode::from(2)
}

/// A pool, of which there is none on this system.
pub struct Pool(Infallible);

impl Pool {
    pub fn open(
        _settings: Settings,
        _starter: impl Fn() -> io::Result<Command> + Send + Sync + 'static,
    ) -> Result<Self, SandboxError> {
        Err(SandboxError::new("this system is not Linux", "run programs of models on a Linux machine"))
    }

    pub fn layers(&self) -> &Layers {
        match self.0 {}
    }

    pub fn run(&self, _requests: &[Request]) -> Result<Vec<Outcome>, SandboxError> {
        match self.0 {}
    }

    pub fn test(&self, _trials: &[Trial]) -> Result<Vec<Tested>, SandboxError> {
        match self.0 {}
    }
}
