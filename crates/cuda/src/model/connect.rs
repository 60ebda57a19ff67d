//! The parts of a model on several devices that store into each other's memory.

use bodkin_backend::Result;

use super::CudaModel;
use crate::constants::MAX_PEERS;
use crate::driver::Memory;
use crate::step::Addresses;

impl CudaModel {
    /// Prepares the persistent kernel of all parts of a model, if every device can run it.
    pub(crate) fn list_all_persistent_stages(parts: &mut [CudaModel]) -> Result<()> {
        parts.iter_mut().try_for_each(CudaModel::list_persistent_stages)?;
        if parts.iter().any(|part| part.persistent.is_none()) {
            parts.iter_mut().for_each(|part| part.persistent = None);
        }
        Ok(())
    }

    /// Lets each part of a model store into the memory of all others.
    pub(crate) fn connect(parts: &mut [CudaModel]) -> Result<()> {
        for part in parts.iter_mut() {
            let mut take = |bytes: usize, what: &str| -> Result<u64> {
                part.memory.push(Memory::zeroed(&part.device, bytes, what)?);
                Ok(part.memory[part.memory.len() - 1].address)
            };
            part.addresses.barriers_reached = take(4 * MAX_PEERS, "the counts of barriers")?;
            part.addresses.barriers_expected = take(4 * MAX_PEERS, "the counts of barriers")?;
            part.addresses.finished_blocks = take(4, "the count of blocks")?;
            for peer_offsets in &mut part.addresses.peer_offsets {
                *peer_offsets = take(8 * MAX_PEERS, "the offsets of values on other devices")?;
            }
        }
        let all: Vec<Addresses> = parts.iter().map(|part| part.addresses.clone()).collect();
        for (i, part) in parts.iter_mut().enumerate() {
            let others = || all.iter().enumerate().filter(|(j, _)| *j != i);
            // Each device counts for the others in their order.
            let arrivals = |(j, other): (usize, &Addresses)| {
                other.barriers_reached + 4 * if i < j { i } else { i - 1 } as u64
            };
            part.addresses.arrivals = others().map(arrivals).collect();
            let starts: [fn(&Addresses) -> u64; 2] = [|a| a.arena, |a| a.non_aliased];
            for (start, &to) in starts.iter().zip(&part.addresses.peer_offsets) {
                let offset = |(_, other)| start(other).wrapping_sub(start(&all[i]));
                let peer_offsets: Vec<u64> = others().map(offset).collect();
                // SAFETY: there is room for `MAX_PEERS`, and the copy has ended after
                // `synchronize`.
                unsafe { part.device.copy_to_device(to, &peer_offsets) }
                    .and_then(|()| part.synchronize())?;
            }
        }
        Ok(())
    }
}
