//! Training in several processes, each a rank: the place of this process among them (`environment`), how they find each
//! other (`rendezvous`) and prove that they belong together (`handshake`), how they speak and notice that one of them is
//! gone (`tcp`, `control`), what must be the same on all (`agreement`), and how work is dealt out (`deal`).

mod agreement;
mod control;
mod deal;
mod environment;
mod handshake;
mod nccl;
mod rendezvous;
mod tcp;
#[cfg(test)]
mod tests;
pub(crate) mod wire;

pub use agreement::{Fact, agree, agree_on_inputs, fail_on_all_ranks};
pub(crate) use deal::{ExpectedLengths, deal};
pub use environment::{Flags, Membership, MembershipError, TOKEN};
pub use nccl::Nccl;
pub use stapo_model::ranks::{RankError, Ranks, Solo, Transport};
pub use tcp::Tcp;
