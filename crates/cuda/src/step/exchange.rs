//! What the devices of a tensor-parallel group do together in a step: they store their columns of
//! values in each other's memory, and wait for each other.

use bodkin_backend::Result;

use super::{Step, THREADS};
use crate::constants::MAX_PEERS;
use crate::lower::Gather;
use crate::parameters::exchange as p;

impl Step<'_> {
    /// Stores this device's columns of `rows` rows on all others, and waits for theirs. Where
    /// devices are not connected, `tensor_parallel.rs` copies them.
    pub(super) fn all_gather(&self, rows: usize, Gather { results, used }: &Gather) -> Result<()> {
        let mut parameters = self.exchange();
        for (own, &(value, weight)) in parameters.values.iter_mut().zip(results) {
            let shape = &self.weights[weight.0].shape;
            let element = self.content(value).element_bytes();
            let (at, stride) = self.result_place(value, shape, *used);
            let bytes = (element * shape.rows) as u32;
            *own =
                p::OwnColumns { at, stride: (element * stride as usize) as u64, bytes, padding: 0 };
        }
        parameters.value_count = results.len() as u32;
        parameters.rows = (rows * used) as u32;
        self.launch_exchange(&parameters)
    }

    /// Waits until all devices have come here.
    pub(crate) fn barrier(&self) -> Result<()> {
        self.launch_exchange(&self.exchange())
    }

    /// The parameters of a barrier.
    fn exchange(&self) -> p::AllGather {
        let mut arrivals = [0; MAX_PEERS];
        for (to, peer) in arrivals.iter_mut().zip(&self.at.peers) {
            *to = peer.arrivals;
        }
        p::AllGather {
            distances: self.distances(),
            arrivals,
            reached: self.at.reached,
            counts: self.at.barrier_counts,
            peers: self.at.peers.len() as u32,
            ..p::AllGather::default()
        }
    }

    /// Bytes from a value of this step to the same one on each other device.
    pub(super) fn distances(&self) -> [u64; MAX_PEERS] {
        let mut distances = [0; MAX_PEERS];
        let is_persistent = self.arena.1 == self.at.non_aliased;
        for (to, peer) in distances.iter_mut().zip(&self.at.peers) {
            *to = peer.distances[usize::from(is_persistent)];
        }
        distances
    }

    fn launch_exchange(&self, parameters: &p::AllGather) -> Result<()> {
        if self.at.peers.is_empty() {
            return Ok(());
        }
        let bytes: u32 = parameters.values.iter().map(|own| own.bytes).sum();
        let units = (parameters.rows * bytes) as usize / size_of::<[u32; 4]>();
        let blocks = units.div_ceil(THREADS).clamp(1, self.device.processors as usize);
        // SAFETY: the values have the step's rows on all devices, whose memory is alive while any
        // of them runs a step.
        unsafe {
            self.device.launch(self.kernels.all_gather, [blocks, 1, 1], THREADS, 0, parameters)
        }
    }
}
