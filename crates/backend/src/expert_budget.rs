//! How many experts of a model have room in memory, and how long its cache remembers their use.
//! This file must not know any device.

/// How much memory the experts of a model may take.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum ExpertBudget {
    /// All of them if they fit, or else what the rest of the model leaves free.
    #[default]
    Auto,
    /// At most this number of bytes on each device, but at least one expert of each layer. On
    /// NVIDIA GPUs it includes memory for experts that a step copies for itself.
    Bytes(u64),
    /// At most this share of the experts of each layer, but at least one.
    Share(f64),
}

impl ExpertBudget {
    /// Whether it asks for less than all experts.
    pub fn is_limit(self) -> bool {
        match self {
            ExpertBudget::Auto => false,
            ExpertBudget::Bytes(_) => true,
            ExpertBudget::Share(share) => share < 1.0,
        }
    }
}

/// Where the experts are that have no slot on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertStore {
    /// In memory of the host, or, where they do not all have room there, in the file.
    #[default]
    Auto,
    /// In the model's file, which is mapped. The host's memory holds some of them: at most these
    /// bytes if a number is given, but enough for a step.
    Mmap(Option<u64>),
}

/// What multiplies an expert's score in each step, in the cache of experts. Each step that chooses
/// the expert then adds 1.
pub const EXPERT_SCORE_DECAY: f32 = 0.8;

/// What the experts of a model take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertBytes {
    /// Experts of the layer that has most.
    pub experts: usize,
    /// Of one expert in each layer.
    pub slot: u64,
    /// Of all experts.
    pub all: u64,
}

/// Bytes of a device that the automatic budget leaves to its driver.
const DRIVER_BYTES: u64 = 512 << 20;

impl ExpertBytes {
    /// The slots of each layer on a device, or none if all experts have room. The model takes
    /// `model` bytes with all of them; `free` are those of the device and `limit` those that the
    /// user allows, if they are known. `missed` are the bytes for experts
    /// without a slot, by the number of slots: a part of the budget, unless that is a share.
    pub fn slots_on_device(
        self,
        budget: ExpertBudget,
        model: u64,
        (free, limit): (Option<u64>, Option<u64>),
        missed: impl Fn(usize) -> u64,
    ) -> Option<usize> {
        // A limit needs no reserve for the driver.
        let free = free.map_or(u64::MAX, |free| free.saturating_sub(DRIVER_BYTES));
        let free = free.min(limit.unwrap_or(u64::MAX));
        let free = free.saturating_sub(model.saturating_sub(self.all));
        let beside = |missed: u64| {
            let budget = match budget {
                ExpertBudget::Bytes(bytes) => ExpertBudget::Bytes(bytes.saturating_sub(missed)),
                budget => budget,
            };
            self.slots(budget, free.saturating_sub(missed))
        };
        // The fewer slots there are, the more experts can be missed.
        let mut slots = beside(0)?;
        loop {
            let fewer = beside(missed(slots))?;
            if fewer >= slots {
                return Some(slots);
            }
            slots = fewer;
        }
    }

    /// The slots of each layer, or none if all experts have room. `free` are the bytes that the
    /// rest of the model leaves.
    pub fn slots(self, budget: ExpertBudget, free: u64) -> Option<usize> {
        let of = |bytes: u64| bytes.checked_div(self.slot).unwrap_or(u64::MAX) as usize;
        let slots = match budget {
            // If not even one expert of each layer fits, the error says what is missing for that.
            ExpertBudget::Auto => of(free).max(1),
            ExpertBudget::Bytes(bytes) => of(bytes).max(1),
            ExpertBudget::Share(share) => ((share * self.experts as f64) as usize).max(1),
        };
        Some(slots).filter(|&slots| slots < self.experts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budgets_become_slots() {
        let bytes = ExpertBytes { experts: 8, slot: 100, all: 800 };
        for (budget, free, slots) in [
            (ExpertBudget::Auto, 900, None),
            (ExpertBudget::Auto, 800, None),
            (ExpertBudget::Auto, 799, Some(7)),
            (ExpertBudget::Auto, 100, Some(1)),
            (ExpertBudget::Auto, 99, Some(1)),
            (ExpertBudget::Bytes(0), 900, Some(1)),
            (ExpertBudget::Bytes(450), 0, Some(4)),
            (ExpertBudget::Bytes(900), 0, None),
            (ExpertBudget::Share(0.0), 0, Some(1)),
            (ExpertBudget::Share(0.5), 0, Some(4)),
            (ExpertBudget::Share(1.0), 0, None),
        ] {
            assert_eq!(bytes.slots(budget, free), slots, "{budget:?} with {free}");
        }
        let (auto, driver) = (ExpertBudget::Auto, DRIVER_BYTES);
        for (free, limit, slots) in [
            (None, None, None),
            (Some(driver + 1000), None, None),
            (Some(driver + 999), None, Some(7)),
            (None, Some(999), Some(7)),
            (Some(driver + 500), Some(999), Some(3)),
        ] {
            let found = bytes.slots_on_device(auto, 1000, (free, limit), |_| 0);
            assert_eq!(found, slots, "{free:?} {limit:?}");
        }
        // Experts without a slot take 30 bytes each, which a share of the experts does not include.
        let missed = |slots: usize| 30 * (8 - slots as u64);
        for (budget, limit, slots) in [
            (ExpertBudget::Bytes(500), None, 3),
            (ExpertBudget::Bytes(0), None, 1),
            (ExpertBudget::Share(0.5), None, 4),
            (auto, Some(700), 3),
            (auto, Some(1000), 8),
        ] {
            let found = bytes.slots_on_device(budget, 1000, (None, limit), missed);
            assert_eq!(found.unwrap_or(8), slots, "{budget:?} {limit:?}");
            let fits = |bytes: u64| slots == 1 || 100 * slots as u64 + missed(slots) <= bytes;
            match budget {
                ExpertBudget::Bytes(bytes) => assert!(fits(bytes)),
                _ => assert!(limit.is_none_or(|limit| fits(limit - 200))),
            }
        }
        let none = ExpertBytes::default();
        assert_eq!(none.slots(ExpertBudget::Auto, 0), None);
        assert_eq!(none.slots(ExpertBudget::Share(0.5), 0), None);
    }
}
