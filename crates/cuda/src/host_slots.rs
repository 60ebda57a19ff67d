//! Which experts have one of the slots in memory of the host, where they come from the model's
//! file. The device exchanges them with others, which it has not used for longer. This file must
//! not know the driver.

use std::ops::Range;

/// The experts that have slots. Experts of all layers are numbered together.
pub(crate) struct HostSlots {
    /// In each slot.
    experts: Vec<Option<usize>>,
    /// The slot of each expert.
    slot_of: Vec<Option<usize>>,
    /// When each expert was read, or was first seen to have come from the device.
    came_at: Vec<u32>,
    /// Scratch: the age of each slot.
    ages: Vec<(u32, usize)>,
}

/// A slot that an expert has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Taken {
    pub(crate) slot: usize,
    pub(crate) expert: usize,
    /// The expert that had it.
    pub(crate) evicted: Option<usize>,
}

impl HostSlots {
    pub(crate) fn new(slots: usize, experts: usize) -> HostSlots {
        HostSlots {
            experts: vec![None; slots],
            slot_of: vec![None; experts],
            came_at: vec![0; experts],
            ages: Vec::with_capacity(slots),
        }
    }

    /// The slot of an expert.
    pub(crate) fn slot_of(&self, expert: usize) -> Option<usize> {
        self.slot_of[expert]
    }

    /// Follows the exchanges before the time `now`: these slots hold these experts now, which they
    /// did not before.
    pub(crate) fn follow(&mut self, now: u32, moved: impl IntoIterator<Item = (usize, usize)>) {
        for (slot, expert) in moved {
            let gone = self.experts[slot].replace(expert);
            // It may have another slot since then.
            if let Some(gone) = gone.filter(|&gone| self.slot_of[gone] == Some(slot)) {
                self.slot_of[gone] = None;
            }
            self.slot_of[expert] = Some(slot);
            self.came_at[expert] = now.wrapping_sub(1);
        }
    }

    /// Gives slots to the experts of a layer that are used at the time `now` and have none: those
    /// of the experts that were used there, or came from the device, least recently. `used_at` has
    /// the time for every expert; no other layer's were used now. Returns them by slot.
    ///
    /// # Panics
    /// If there are fewer slots than experts of the layer that are used now.
    pub(crate) fn take(&mut self, layer: Range<usize>, now: u32, used_at: &[u32]) -> Vec<Taken> {
        let is_missing = |&e: &usize| used_at[e] == now && self.slot_of[e].is_none();
        let missing: Vec<usize> = layer.filter(is_missing).collect();
        let age = |expert: &Option<usize>| match *expert {
            None => u32::MAX,
            // The clock starts again after 2^32 layers.
            Some(expert) => {
                now.wrapping_sub(used_at[expert]).min(now.wrapping_sub(self.came_at[expert]))
            }
        };
        self.ages.clear();
        self.ages.extend(self.experts.iter().map(age).zip(0..));
        if missing.len() < self.ages.len() {
            self.ages.select_nth_unstable_by(missing.len(), |a, b| b.cmp(a));
        }
        self.ages.truncate(missing.len());
        let are_free =
            self.ages.len() == missing.len() && self.ages.iter().all(|(age, _)| *age > 0);
        assert!(are_free, "there are slots for all experts that a layer misses");
        self.ages.sort_unstable_by_key(|(_, slot)| *slot);
        let taken = self.ages.iter().zip(missing).map(|(&(_, slot), expert)| {
            let evicted = self.experts[slot].replace(expert);
            if let Some(evicted) = evicted {
                self.slot_of[evicted] = None;
            }
            self.slot_of[expert] = Some(slot);
            self.came_at[expert] = now;
            Taken { slot, expert, evicted }
        });
        taken.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_expert_used_least_recently_loses_its_slot() {
        let taken = |slot, expert, evicted| Taken { slot, expert, evicted };
        // Two layers of three experts, and three slots.
        let (mut slots, mut used_at) = (HostSlots::new(3, 6), [0; 6]);
        let mut run = |now: u32, layer: usize, chosen: &[usize]| {
            chosen.iter().for_each(|&expert| used_at[expert] = now);
            slots.take(3 * layer..3 * layer + 3, now, &used_at)
        };
        assert_eq!(run(1, 0, &[0, 2]).len(), 2);
        assert_eq!(run(2, 1, &[4]).len(), 1);
        assert_eq!(run(3, 0, &[0]), []);
        // 2 has not been used for longer than 4 and 0.
        let [first] = run(4, 1, &[5])[..] else { panic!("one expert is missing") };
        assert_eq!((first.expert, first.evicted), (5, Some(2)));
        // 0 and 4 make room, not 5, which is used in this layer.
        let all = run(5, 1, &[3, 4, 5]);
        assert_eq!(all, [taken(all[0].slot, 3, Some(0))]);
        // Those that came with the step before, and are on the device now, are replaced.
        assert_eq!(run(6, 0, &[0, 1, 2]).len(), 3);
        assert_eq!(run(7, 1, &[3, 4, 5]).len(), 3);
    }

    #[test]
    fn experts_from_the_device_are_as_new_as_those_that_were_used() {
        let (mut slots, mut used_at) = (HostSlots::new(2, 5), [0; 5]);
        for (now, expert) in [(1, 0), (2, 1)] {
            used_at[expert] = now;
            slots.take(0..5, now, &used_at);
        }
        // The device has taken 0, and 4 had its place there.
        slots.follow(4, [(slots.slot_of[0].unwrap(), 4)]);
        used_at[2] = 4;
        let taken = slots.take(0..5, 4, &used_at);
        assert_eq!((taken[0].expert, taken[0].evicted), (2, Some(1)));
        used_at[0] = 5;
        let taken = slots.take(0..5, 5, &used_at);
        assert_eq!((taken[0].expert, taken[0].evicted), (0, Some(4)));
    }

    #[test]
    fn experts_may_change_places_between_two_requests() {
        let (mut slots, mut used_at) = (HostSlots::new(2, 4), [1, 2, 0, 0]);
        slots.take(0..4, 1, &used_at);
        slots.take(0..4, 2, &used_at);
        let [first, second] = [0, 1].map(|expert| slots.slot_of[expert].unwrap());
        slots.follow(3, [(second, 0), (first, 1)]);
        assert_eq!([slots.slot_of[0], slots.slot_of[1]], [Some(second), Some(first)]);
        // 0 has gone to the device and come back to the slot of 1, and 3 is where it was.
        slots.follow(4, [(first, 0), (second, 3)]);
        assert_eq!([slots.slot_of[0], slots.slot_of[1]], [Some(first), None]);
        used_at[0] = 5;
        assert_eq!(slots.take(0..4, 5, &used_at), []);
    }

    #[test]
    fn the_clock_may_start_again() {
        let (mut slots, mut used_at) = (HostSlots::new(2, 4), [u32::MAX - 1, u32::MAX, 9, 9]);
        assert_eq!(slots.take(0..4, u32::MAX - 1, &used_at).len(), 1);
        assert_eq!(slots.take(0..4, u32::MAX, &used_at).len(), 1);
        used_at[2] = 1;
        let taken = slots.take(0..4, 1, &used_at);
        assert_eq!((taken[0].expert, taken[0].evicted), (2, Some(0)));
        used_at[3] = 2;
        let taken = slots.take(0..4, 2, &used_at);
        assert_eq!((taken[0].expert, taken[0].evicted), (3, Some(1)));
    }

    #[test]
    #[should_panic(expected = "slots for all experts")]
    fn too_few_slots_are_a_mistake() {
        HostSlots::new(1, 2).take(0..2, 1, &[1, 1]);
    }
}
