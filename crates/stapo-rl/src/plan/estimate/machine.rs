//! The machines that a run can be planned for, and their rates: measured by this program's benchmarks or published by
//! the maker.

use super::links::{self, Links};
pub use super::rate::{Origin, Rate};

/// Operations per second of attention by sequence length, in order of the lengths.
pub type ByLength = [(f64, f64); 4];

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Processor {
    Cpu,
    Gpu,
}

/// The share of a ceiling that each kind of work reaches.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shares {
    /// Of `products`, by the matrix products of a training pass, of a prompt's pass and of a decode step.
    pub training: f64,
    pub prefill: f64,
    pub decode: f64,
    /// Of `bandwidth`, by norms, rope and swiglu, by the optimizer, and by decode attention over the keys of one
    /// sequence and over keys that several sequences share.
    pub elementwise: f64,
    pub optimizer: f64,
    pub own_keys: f64,
    pub shared_keys: f64,
}

/// Seconds that do not follow from operations or bytes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Fixed {
    /// The kernels of one layer for one row, products' bytes aside.
    pub layer: f64,
    /// Scheduling and delivering one sampled token on the host; a GPU computes meanwhile.
    pub sampled_token: f64,
    /// What one response token of an update takes beyond the other terms: on a GPU slower products of narrow models, on a CPU
    /// effects, census and columns.
    pub trained_token: f64,
    /// Turning one response into text, judging it by rules and recording it.
    pub response: f64,
    /// The first step beyond a later one: compiling kernels, choosing algorithms, recording graphs.
    pub first_step: f64,
}

/// A machine with its rates.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Machine {
    pub name: &'static str,
    pub description: &'static str,
    pub processor: Processor,
    /// Memory that a run can take; `None` for main memory, which this machine reports.
    pub memory_bytes: Option<u64>,
    /// Operations of large matrix products.
    pub products: Rate,
    /// Bytes read and written by a copy.
    pub bandwidth: Rate,
    pub attention_forward: ByLength,
    pub attention_backward: ByLength,
    pub attention_origin: Origin,
    /// Bytes of weights and moments that the device hashes where they lie.
    pub state_hash: Rate,
    /// Bytes from the device to the host, bytes of a file hashed by one core, and bytes written to disk.
    pub host_copy: Rate,
    pub hash: Rate,
    pub disk: Rate,
    pub shares: Shares,
    pub fixed: Fixed,
    /// How several of them reach each other.
    pub links: Links,
}

const TABLE: &str = "docs/performance.md";
const CPU_TABLE: &str = "docs/performance-cpu.md, by two quiet cores";

const H200: Machine = Machine {
    name: "h200",
    description: "one NVIDIA H200, 141 GB",
    processor: Processor::Gpu,
    memory_bytes: Some(139 << 30),
    products: Rate { per_second: 790e12, origin: Origin::Measured(TABLE) },
    bandwidth: Rate { per_second: 4.26e12, origin: Origin::Measured(TABLE) },
    attention_forward: [(256.0, 158e12), (2048.0, 476e12), (8192.0, 563e12), (16384.0, 561e12)],
    attention_backward: [(256.0, 128e12), (2048.0, 379e12), (8192.0, 508e12), (16384.0, 533e12)],
    attention_origin: Origin::Measured(TABLE),
    state_hash: Rate { per_second: 350e9, origin: Origin::Measured(TABLE) },
    host_copy: Rate { per_second: 10e9, origin: Origin::Assumed("a copy to pageable memory over PCIe 5") },
    hash: Rate { per_second: 1.5e9, origin: Origin::Assumed("SHA-256 on one core with SHA instructions") },
    disk: Rate { per_second: 1e9, origin: Origin::Assumed("a local NVMe disk") },
    shares: Shares {
        training: 0.89,
        prefill: 0.67,
        decode: 0.675,
        elementwise: 0.88,
        optimizer: 0.93,
        own_keys: 0.97,
        shared_keys: 0.60,
    },
    fixed: Fixed {
        layer: 28.5e-6,
        sampled_token: 1.6e-6,
        trained_token: 3.0e-6,
        response: 60e-6,
        first_step: 3.0,
    },
    links: links::HOPPER,
};

/// The published ceilings of the H200, of which it reaches 790 TFLOP/s and 4.26 TB/s.
const H200_PUBLISHED_PRODUCTS: f64 = 989e12;
const H200_PUBLISHED_BANDWIDTH: f64 = 4.8e12;

/// A GPU with published ceilings only. Shares and attention are taken from the H200 in proportion.
const fn published(
    name: &'static str,
    description: &'static str,
    memory_bytes: u64,
    products: f64,
    bandwidth: f64,
    source: &'static str,
    links: Links,
) -> Machine {
    let products_share = H200.products.per_second / H200_PUBLISHED_PRODUCTS;
    let bandwidth_share = H200.bandwidth.per_second / H200_PUBLISHED_BANDWIDTH;
    let factor = products / H200_PUBLISHED_PRODUCTS;
    Machine {
        name,
        description,
        memory_bytes: Some(memory_bytes),
        products: Rate { per_second: products * products_share, origin: Origin::Published(source) },
        bandwidth: Rate { per_second: bandwidth * bandwidth_share, origin: Origin::Published(source) },
        attention_forward: scaled(H200.attention_forward, factor),
        attention_backward: scaled(H200.attention_backward, factor),
        attention_origin: Origin::Published(source),
        state_hash: Rate {
            per_second: H200.state_hash.per_second * factor,
            origin: Origin::Assumed("the H200's, in proportion to products"),
        },
        links,
        ..H200
    }
}

const fn scaled(mut rates: ByLength, factor: f64) -> ByLength {
    let mut i = 0;
    while i < rates.len() {
        rates[i].1 *= factor;
        i += 1;
    }
    rates
}

/// Two cores of a Xeon with AVX-512, without busy neighbours.
const CPU: Machine = Machine {
    name: "cpu",
    description: "a CPU with AVX-512, in f32",
    processor: Processor::Cpu,
    memory_bytes: None,
    products: Rate { per_second: 350e9, origin: Origin::Measured(CPU_TABLE) },
    bandwidth: Rate { per_second: 45e9, origin: Origin::Measured(CPU_TABLE) },
    attention_forward: [(256.0, 67e9), (2048.0, 67e9), (8192.0, 67e9), (16384.0, 67e9)],
    attention_backward: [(256.0, 84e9), (2048.0, 84e9), (8192.0, 84e9), (16384.0, 84e9)],
    attention_origin: Origin::Measured(CPU_TABLE),
    state_hash: Rate {
        per_second: 3e9,
        origin: Origin::Assumed("SHA-256 on two cores with SHA instructions"),
    },
    host_copy: Rate { per_second: 4e9, origin: Origin::Assumed("a copy by one core") },
    hash: Rate { per_second: 1.5e9, origin: Origin::Assumed("SHA-256 on one core with SHA instructions") },
    disk: Rate { per_second: 0.5e9, origin: Origin::Assumed("a local disk") },
    shares: Shares {
        training: 0.66,
        prefill: 0.66,
        decode: 0.66,
        elementwise: 0.5,
        optimizer: 0.5,
        own_keys: 0.38,
        shared_keys: 0.38,
    },
    fixed: Fixed {
        layer: 20e-6,
        sampled_token: 1.6e-6,
        trained_token: 3.5e-6,
        response: 60e-6,
        first_step: 0.0,
    },
    links: links::TCP,
};

/// Cores that the rates of the machine `cpu` are of.
pub const CPU_CORES: usize = 2;

const MACHINES: [Machine; 5] = [
    H200,
    published(
        "h100",
        "one NVIDIA H100 SXM, 80 GB",
        79 << 30,
        989e12,
        3.35e12,
        "NVIDIA's H100 data sheet: 989 TFLOP/s in bf16 without sparsity, 3.35 TB/s",
        links::HOPPER,
    ),
    published(
        "a100",
        "one NVIDIA A100 SXM, 80 GB",
        79 << 30,
        312e12,
        2.039e12,
        "NVIDIA's A100 data sheet: 312 TFLOP/s in bf16 without sparsity, 2.039 TB/s",
        links::AMPERE,
    ),
    published(
        "rtx4090",
        "one NVIDIA GeForce RTX 4090, 24 GB",
        (47 << 30) / 2,
        165.2e12,
        1.008e12,
        "NVIDIA's Ada whitepaper: 165.2 TFLOP/s in bf16 with f32 sums, 1.008 TB/s",
        links::THROUGH_HOST,
    ),
    CPU,
];

impl Machine {
    pub fn all() -> &'static [Machine] {
        &MACHINES
    }

    pub fn by_name(name: &str) -> Option<Machine> {
        MACHINES.iter().find(|machine| machine.name == name).copied()
    }

    /// The widest heads that attention takes; any on a CPU.
    pub fn max_head_dim(&self) -> Option<usize> {
        match (self.processor, self.name) {
            (Processor::Cpu, _) => None,
            (_, "h100" | "h200") => Some(256),
            _ => Some(128),
        }
    }

    /// The machine `cpu` with another number of cores: operations follow the cores, memory's bandwidth does not.
    pub fn cpu(n_cores: usize) -> Machine {
        let factor = n_cores as f64 / CPU_CORES as f64;
        let products = Rate { per_second: CPU.products.per_second * factor, ..CPU.products };
        Machine {
            products,
            attention_forward: scaled(CPU.attention_forward, factor),
            attention_backward: scaled(CPU.attention_backward, factor),
            ..CPU
        }
    }

    /// The machine that a driver's name of a GPU, such as `NVIDIA H100 80GB HBM3`, stands for.
    pub fn of_gpu(driver_name: &str) -> Option<Machine> {
        let plain: String = driver_name.to_ascii_lowercase().split_whitespace().collect();
        MACHINES.iter().find(|machine| plain.contains(machine.name)).copied()
    }
}

/// A rate between the given lengths, by the logarithm of the length; outside them, the nearest.
pub fn at_length(rates: &ByLength, length: f64) -> f64 {
    let mut before = rates[0];
    for &after in rates {
        if length <= after.0 {
            if after.0 <= before.0 {
                return after.1;
            }
            let share = (length / before.0).ln() / (after.0 / before.0).ln();
            return before.1 + share * (after.1 - before.1);
        }
        before = after;
    }
    before.1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_lie_between_their_neighbours() {
        let rates = [(1.0, 10.0), (4.0, 30.0), (8.0, 50.0), (16.0, 60.0)];
        for (length, rate) in [(0.5, 10.0), (1.0, 10.0), (2.0, 20.0), (4.0, 30.0), (16.0, 60.0), (99.0, 60.0)]
        {
            assert!((at_length(&rates, length) - rate).abs() < 1e-9, "{length}");
        }
    }

    #[test]
    fn machines_are_found_by_their_names() {
        for machine in Machine::all() {
            assert_eq!(Machine::by_name(machine.name).as_ref(), Some(machine));
        }
        assert_eq!(Machine::by_name("h300"), None);
        let names = [
            ("NVIDIA H200", Some("h200")),
            ("NVIDIA A100-SXM4-80GB", Some("a100")),
            ("NVIDIA GeForce RTX 4090", Some("rtx4090")),
            ("NVIDIA L4", None),
        ];
        for (driver_name, name) in names {
            assert_eq!(Machine::of_gpu(driver_name).map(|machine| machine.name), name, "{driver_name}");
        }
    }

    #[test]
    fn published_ceilings_are_lowered_to_the_share_that_the_h200_reaches() {
        let h100 = Machine::by_name("h100").unwrap();
        assert!((h100.products.per_second / 790e12 - 1.0).abs() < 1e-9);
        assert!((h100.bandwidth.per_second / (3.35e12 * 4.26 / 4.8) - 1.0).abs() < 1e-9);
        let a100 = Machine::by_name("a100").unwrap();
        assert!((a100.attention_forward[1].1 / (476e12 * 312.0 / 989.0) - 1.0).abs() < 1e-9);
        assert_eq!(a100.products.origin.word(), "published");
        assert_eq!(H200.products.origin.word(), "measured");
    }

    #[test]
    fn more_cores_multiply_faster_and_read_as_fast() {
        let [two, eight] = [Machine::cpu(2), Machine::cpu(8)];
        assert_eq!(two, Machine::by_name("cpu").unwrap());
        assert!((eight.products.per_second / two.products.per_second - 4.0).abs() < 1e-9);
        assert_eq!(eight.bandwidth, two.bandwidth);
    }
}
