//! Rates, each with its origin.

/// Where a figure comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// By a benchmark of this program, with the place where the figure stands.
    Measured(&'static str),
    /// The maker's figure, lowered to the share that the H200 reaches of its maker's figure.
    Published(&'static str),
    /// Nobody measured it here: a figure that is usual for such machines.
    Assumed(&'static str),
}

impl Origin {
    /// `measured`, `published` or `assumed`.
    pub fn word(self) -> &'static str {
        match self {
            Origin::Measured(_) => "measured",
            Origin::Published(_) => "published",
            Origin::Assumed(_) => "assumed",
        }
    }

    pub fn source(self) -> &'static str {
        let (Origin::Measured(source) | Origin::Published(source) | Origin::Assumed(source)) = self;
        source
    }
}

/// Operations or bytes per second.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rate {
    pub per_second: f64,
    pub origin: Origin,
}
