//! How fast ranks reach each other.

use super::rate::{Origin, Rate};

/// The links of a machine. Every rate is of one rank and one direction: a rank receives as fast as it sends, at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Links {
    /// Bytes to ranks of the same machine, and to ranks of other machines.
    pub within: Rate,
    pub between: Rate,
    /// Bytes between hosts, over which responses and their scores go.
    pub host: Rate,
    /// Seconds of one message beyond its bytes.
    pub message: f64,
    /// GPUs that a machine of this kind usually has.
    pub ranks_per_node: usize,
}

const HOST: Rate = Rate { per_second: 2e9, origin: Origin::Assumed("TCP by one connection a rank") };

/// What a grouped send of NCCL takes for one more peer, in seconds. Assumed.
const NCCL_MESSAGE: f64 = 3e-6;

pub(super) const HOPPER: Links = Links {
    within: Rate {
        per_second: 360e9,
        origin: Origin::Published(
            "NCCL's maintainers, for 8 H100 by NVLink (NVIDIA/nccl-tests issue 326); 450 GB/s by the data sheet",
        ),
    },
    between: Rate {
        per_second: 40e9,
        origin: Origin::Published("an adapter of 400 Gb/s a GPU, as in NVIDIA's DGX H200, at 80 %"),
    },
    host: HOST,
    message: NCCL_MESSAGE,
    ranks_per_node: 8,
};

pub(super) const AMPERE: Links = Links {
    within: Rate {
        per_second: 200e9,
        origin: Origin::Published(
            "users of 8 A100 by NVLink (NVIDIA/nccl-tests issue 149); 300 GB/s by the data sheet",
        ),
    },
    between: Rate {
        per_second: 20e9,
        origin: Origin::Published("an adapter of 200 Gb/s a GPU, as in NVIDIA's DGX A100, at 80 %"),
    },
    host: HOST,
    message: NCCL_MESSAGE,
    ranks_per_node: 8,
};

/// GPUs without direct access to each other.
pub(super) const THROUGH_HOST: Links = Links {
    within: Rate { per_second: 12e9, origin: Origin::Assumed("PCIe 4 through the host's memory") },
    between: Rate { per_second: 2.5e9, origin: Origin::Assumed("a network of 25 Gb/s, at 80 %") },
    host: HOST,
    message: NCCL_MESSAGE,
    ranks_per_node: 4,
};

pub(super) const TCP: Links = Links {
    within: Rate { per_second: 1e9, origin: Origin::Assumed("TCP within one machine") },
    between: Rate { per_second: 1e9, origin: Origin::Assumed("TCP over a network of 10 Gb/s, at 80 %") },
    host: Rate { per_second: 1e9, ..HOST },
    message: 30e-6,
    ranks_per_node: usize::MAX,
};

impl Links {
    /// Links of one given rate, wherever the other rank is.
    #[must_use]
    pub fn at(self, per_second: f64) -> Links {
        let rate = Rate { per_second, origin: Origin::Assumed("as given") };
        Links { within: rate, between: rate, ..self }
    }
}

/// The ranks of a run: one for each GPU.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct World {
    pub n_ranks: usize,
    /// Machines, each with as many ranks as any other, or one more.
    pub n_nodes: usize,
    pub links: Links,
}

impl World {
    pub fn one(links: Links) -> World {
        World { n_ranks: 1, n_nodes: 1, links }
    }

    /// As many machines as the ranks need, unless given.
    pub fn new(n_ranks: usize, n_nodes: Option<usize>, links: Links) -> World {
        let n_nodes = n_nodes.unwrap_or_else(|| n_ranks.div_ceil(links.ranks_per_node));
        World { n_ranks: n_ranks.max(1), n_nodes: n_nodes.clamp(1, n_ranks.max(1)), links }
    }

    /// The ranks as a factor.
    pub fn ranks(&self) -> f64 {
        self.n_ranks as f64
    }

    /// Other ranks on the same machine, and on other machines.
    fn others(&self) -> (f64, f64) {
        let within = self.n_ranks.div_ceil(self.n_nodes);
        ((within - 1) as f64, (self.n_ranks - within) as f64)
    }

    /// Seconds in which every rank sends every other its part of `bytes`, all parts being equal, in `n_groups` groups of
    /// messages. Links within a machine and between machines work at once.
    pub fn exchange(&self, bytes: f64, n_groups: f64) -> f64 {
        let (within, between) = self.others();
        let part = bytes / self.ranks();
        let sending = (within * part / self.links.within.per_second)
            .max(between * part / self.links.between.per_second);
        sending + n_groups * (within + between) * self.links.message
    }

    /// Seconds in which rank 0 receives the parts of `bytes` that the other ranks hold.
    pub fn gather(&self, bytes: f64) -> f64 {
        let (within, between) = self.others();
        let part = bytes / self.ranks();
        (within * part / self.links.within.per_second).max(between * part / self.links.between.per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_rank_sends_nothing() {
        let one = World::one(HOPPER);
        assert_eq!((one.exchange(1e9, 30.0), one.gather(1e9)), (0.0, 0.0));
    }

    #[test]
    fn the_network_decides_between_machines() {
        let quiet = Links { message: 0.0, ..HOPPER };
        let eight = World::new(8, None, quiet);
        assert_eq!(eight.n_nodes, 1);
        // 7 of 8 parts leave by NVLink.
        assert!((eight.exchange(8e9, 30.0) - 7e9 / 360e9).abs() < 1e-12);
        let sixteen = World::new(16, None, quiet);
        assert_eq!(sixteen.n_nodes, 2);
        // 8 of 16 parts leave by the network, 7 by NVLink meanwhile.
        assert!((sixteen.exchange(16e9, 30.0) - 8e9 / 40e9).abs() < 1e-12);
        let flat = World::new(16, Some(2), quiet.at(400e9));
        assert!((flat.exchange(16e9, 30.0) - 8e9 / 400e9).abs() < 1e-12);
        assert_eq!(World::new(3, Some(99), quiet).n_nodes, 3);
    }

    #[test]
    fn messages_cost_by_their_number() {
        let world = World::new(512, None, HOPPER);
        assert!((world.exchange(0.0, 30.0) - 30.0 * 511.0 * 3e-6).abs() < 1e-12);
    }
}
