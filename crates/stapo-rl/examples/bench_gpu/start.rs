//! Where the time until the end of the first step goes.

use stapo_model::Device;
use std::time::Instant;

/// The seconds from the start of the program to the end of the first step, in parts.
pub struct Start {
    begin: Instant,
    parts: Vec<(&'static str, f64)>,
}

impl Start {
    pub fn new() -> Self {
        Self { begin: Instant::now(), parts: Vec::new() }
    }

    pub fn seconds(&self) -> f64 {
        self.parts.iter().map(|(_, seconds)| seconds).sum()
    }

    pub fn end_part(&mut self, name: &'static str) {
        self.parts.push((name, self.begin.elapsed().as_secs_f64() - self.seconds()));
    }

    /// As the fields of a JSON object.
    pub fn parts(&self) -> String {
        let fields = self.parts.iter().map(|(name, seconds)| format!(r#""{name}": {seconds:.2}"#));
        fields.collect::<Vec<_>>().join(", ")
    }
}

/// Seconds in which the host waited for kernels. Prints those of the sources that took long.
pub fn waited_seconds(device: &Device) -> f64 {
    let waits = device.kernel_waits();
    for (source, seconds) in waits.iter().filter(|(_, seconds)| *seconds >= 0.02) {
        eprintln!("waited {seconds:.2} s for {source}");
    }
    waits.iter().map(|(_, seconds)| seconds).sum()
}
