//! The parts of a model on several devices that store into each other's memory.

use bodkin_backend::Result;

use super::CudaModel;
use crate::constants::MAX_PEERS;
use crate::driver::Memory;
use crate::step::{Addresses, Peer};

impl CudaModel {
    /// Lets each part of a model store into the memory of all others.
    pub(crate) fn connect(parts: &mut [CudaModel]) -> Result<()> {
        for part in parts.iter_mut() {
            let mut take = |bytes: usize, what: &str| -> Result<u64> {
                part.memory.push(Memory::zeroed(&part.device, bytes, what)?);
                Ok(part.memory[part.memory.len() - 1].address)
            };
            part.addresses.reached = take(4 * MAX_PEERS, "the counts of barriers")?;
            part.addresses.barrier_counts = take(8, "the counts of barriers")?;
        }
        let all: Vec<Addresses> = parts.iter().map(|part| part.addresses.clone()).collect();
        for (i, part) in parts.iter_mut().enumerate() {
            let others = all.iter().enumerate().filter(|(j, _)| *j != i);
            let peer = |(j, other): (usize, &Addresses)| {
                let distance = |of: fn(&Addresses) -> u64| of(other).wrapping_sub(of(&all[i]));
                // Each device counts for the others in their order.
                let place = if i < j { i } else { i - 1 };
                let arrivals = other.reached + 4 * place as u64;
                Peer { distances: [distance(|a| a.arena), distance(|a| a.non_aliased)], arrivals }
            };
            part.addresses.peers = others.map(peer).collect();
        }
        Ok(())
    }
}
