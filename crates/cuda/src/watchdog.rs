//! The host's part of the persistent kernel's watchdog (`kernels/persistent.cuh`), which ends a
//! grid that makes no progress for two seconds. The device is lost then, so all later steps fail.

use std::sync::Arc;

use bodkin_backend::{Error, Result};

use crate::driver::{Device, Pinned};

/// The watchdog of a model.
pub(crate) struct Watchdog {
    /// Of each block: the stage in which it is stuck, from 1 on, or 0.
    stalled: Pinned<u32>,
    /// Of the kernel's stages.
    names: Vec<String>,
}

impl Watchdog {
    pub(crate) fn new(device: &Arc<Device>, names: Vec<String>) -> Result<Watchdog> {
        let stalled = Pinned::zeroed(device, device.processors as usize)?;
        Ok(Watchdog { stalled, names })
    }

    /// Where blocks report their stages.
    pub(crate) fn address(&self) -> u64 {
        self.stalled.address()
    }

    /// The error of a grid that the watchdog ended. It names the first stage in which a block is
    /// stuck: blocks in later stages wait for its results.
    pub(crate) fn error(&self) -> Option<Error> {
        let stages = self.stalled.slice().iter().filter(|&&stage| stage > 0);
        let stage = *stages.min()? as usize - 1;
        let name = self.names.get(stage)?;
        Some(Error::Config(format!(
            "cuda: no progress for 2 s in stage {stage} ({name}) of the persistent kernel: the \
             model can run no more steps"
        )))
    }
}
