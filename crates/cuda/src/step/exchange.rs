//! What the devices of a tensor-parallel group do together in a step: they store their columns of
//! values in each other's memory, and wait for each other.

use bodkin_backend::Result;

use super::{Step, THREADS};
use crate::constants::MAX_PEERS;
use crate::lower::Gather;
use crate::parameters::exchange as p;

impl Step<'_> {
    /// Waits for the other devices' columns of `rows` rows, and stores this device's columns there
    /// if the matmul has not done so. Devices that are not connected copy them:
    /// `tensor_parallel.rs`.
    pub(super) fn all_gather(&self, rows: usize, gather: &Gather) -> Result<()> {
        let Gather { results, used, are_stored } = gather;
        let mut parameters = self.exchange();
        for (own, &(value, weight)) in parameters.values.iter_mut().zip(results) {
            let shape = &self.weights[weight.0].shape;
            let element = self.content(value).element_bytes();
            let (at, stride) = self.result_address(value, shape, *used);
            let stride = (element * stride as usize) as u64;
            let bytes = (element * shape.rows) as u32;
            *own = p::OwnColumns { at, stride, bytes, padding: 0 };
        }
        parameters.value_count = if *are_stored { 0 } else { results.len() as u32 };
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
        arrivals[..self.at.arrivals.len()].copy_from_slice(&self.at.arrivals);
        p::AllGather {
            peer_offsets: self.peer_offsets(),
            arrivals,
            reached: self.at.barriers_reached,
            expected: self.at.barriers_expected,
            finished_blocks: self.at.finished_blocks,
            peers: self.at.arrivals.len() as u32,
            ..p::AllGather::default()
        }
    }

    /// The address of the offsets from this step's values to those of the other devices.
    pub(super) fn peer_offsets(&self) -> u64 {
        let is_persistent = self.arena.1 == self.at.non_aliased;
        self.at.peer_offsets[usize::from(is_persistent)]
    }

    fn launch_exchange(&self, parameters: &p::AllGather) -> Result<()> {
        if self.at.arrivals.is_empty() {
            return Ok(());
        }
        let values = &parameters.values[..parameters.value_count as usize];
        let bytes: usize = values.iter().map(|own| own.bytes as usize).sum();
        let units = parameters.rows as usize * bytes / size_of::<[u32; 4]>();
        let blocks = units.div_ceil(THREADS).clamp(1, self.device.processors as usize);
        // SAFETY: the values have the step's rows on all devices, whose memory is alive while any
        // of them runs a step.
        unsafe {
            self.device.launch(self.kernels.all_gather, [blocks, 1, 1], THREADS, 0, parameters)
        }
    }
}
