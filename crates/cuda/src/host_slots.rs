//! Which experts have one of the slots in memory of the host, where they come from the model's
//! file. The device exchanges them with others, which it has not used for longer. Of the rest, the
//! ones that were used least recently lose their slots (LRU), in prompts those that were used most
//! recently (MRU). This file must not know the driver.

use std::ops::Range;

/// The experts that have slots. Experts of all layers are numbered together.
pub(crate) struct HostSlots {
    /// In each slot.
    experts: Vec<Option<usize>>,
    /// The slot of each expert.
    slot_of: Vec<Option<usize>>,
    are_on_device: Vec<bool>,
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

/// Which experts lose their slots first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Victims {
    /// Those that were used least recently: LRU.
    Oldest,
    /// Those that were used most recently, before now: MRU. Where layers use nearly all of their
    /// experts, one after the other, these are needed last.
    Newest,
}

impl HostSlots {
    /// No expert is in a slot, and these are on the device.
    pub(crate) fn new(slots: usize, are_on_device: Vec<bool>) -> HostSlots {
        let experts = are_on_device.len();
        HostSlots {
            experts: vec![None; slots],
            slot_of: vec![None; experts],
            are_on_device,
            came_at: vec![0; experts],
            ages: Vec::with_capacity(slots),
        }
    }

    /// The slot of an expert.
    pub(crate) fn slot_of(&self, expert: usize) -> Option<usize> {
        self.slot_of[expert]
    }

    pub(crate) fn is_on_device(&self, expert: usize) -> bool {
        self.are_on_device[expert]
    }

    /// The experts of a layer that are only in the file.
    pub(crate) fn absent(&self, layer: Range<usize>) -> Vec<usize> {
        layer.filter(|&e| self.slot_of[e].is_none() && !self.are_on_device[e]).collect()
    }

    /// Follows the exchanges before the time `now`: these slots hold these experts now, which they
    /// did not before.
    pub(crate) fn follow(&mut self, now: u32, moved: impl IntoIterator<Item = (usize, usize)>) {
        for (slot, expert) in moved {
            let gone = self.experts[slot].replace(expert);
            // It may have another slot since then.
            if let Some(gone) = gone.filter(|&gone| self.slot_of[gone] == Some(slot)) {
                self.slot_of[gone] = None;
                self.are_on_device[gone] = true;
            }
            self.slot_of[expert] = Some(slot);
            self.are_on_device[expert] = false;
            self.came_at[expert] = now.wrapping_sub(1);
        }
    }

    /// Gives slots to absent experts: those of experts that were not used at the time `now`, nor
    /// came then, nor are `spared`. If there are too few, the last ones get none. Returns them by
    /// slot.
    pub(crate) fn take(
        &mut self,
        mut absent: Vec<usize>,
        now: u32,
        used_at: &[u32],
        victims: Victims,
        spared: Range<usize>,
    ) -> Vec<Taken> {
        let age = |expert: &Option<usize>| match *expert {
            // The clock starts again after 2^32 layers.
            Some(expert) => {
                now.wrapping_sub(used_at[expert]).min(now.wrapping_sub(self.came_at[expert]))
            }
            None => u32::MAX,
        };
        self.ages.clear();
        let is_spared = |expert: &Option<usize>| expert.is_some_and(|e| spared.contains(&e));
        let others = self.experts.iter().zip(0..).filter(|(expert, _)| !is_spared(expert));
        let ages = others.map(|(expert, slot)| (age(expert), slot));
        self.ages.extend(ages.filter(|(age, _)| *age > 0));
        absent.truncate(self.ages.len());
        if absent.len() < self.ages.len() {
            let first = |&(age, _): &(u32, usize)| match victims {
                Victims::Oldest => u32::MAX - age,
                // Free slots are the first ones.
                Victims::Newest => age.wrapping_add(1),
            };
            self.ages.select_nth_unstable_by_key(absent.len(), first);
        }
        self.ages.truncate(absent.len());
        self.ages.sort_unstable_by_key(|(_, slot)| *slot);
        let taken = self.ages.iter().zip(absent).map(|(&(_, slot), expert)| {
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

    impl HostSlots {
        /// Takes slots for those experts of a layer that are used now and have none.
        fn take_used(&mut self, layer: Range<usize>, now: u32, used_at: &[u32]) -> Vec<Taken> {
            let mut used = self.absent(layer);
            used.retain(|&expert| used_at[expert] == now);
            self.take(used, now, used_at, Victims::Oldest, 0..0)
        }
    }

    #[test]
    fn the_expert_used_least_recently_loses_its_slot() {
        let taken = |slot, expert, evicted| Taken { slot, expert, evicted };
        // Two layers of three experts, and three slots.
        let (mut slots, mut used_at) = (HostSlots::new(3, vec![false; 6]), [0; 6]);
        let mut run = |now: u32, layer: usize, chosen: &[usize]| {
            chosen.iter().for_each(|&expert| used_at[expert] = now);
            slots.take_used(3 * layer..3 * layer + 3, now, &used_at)
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
    fn experts_that_were_used_last_may_lose_their_slots() {
        // Three layers of two experts, of which one is on the device.
        let on_device = vec![true, false, true, false, true, false];
        let (mut slots, mut used_at) = (HostSlots::new(2, on_device), [0; 6]);
        let mut evicted = Vec::new();
        for now in 1..7 {
            let layer = (now as usize - 1) % 3;
            used_at[2 * layer + 1] = now;
            let absent = slots.absent(2 * layer..2 * layer + 2);
            let taken = slots.take(absent, now, &used_at, Victims::Newest, 0..0);
            evicted.extend(taken.iter().filter_map(|taken| taken.evicted));
        }
        // One of the three is read in each round, and the last one before it makes room.
        assert_eq!(evicted, [3, 1]);
        // There is no room beside those that are used now.
        used_at = [7; 6];
        assert_eq!(slots.take(vec![0, 2], 7, &used_at, Victims::Newest, 0..0), []);
        // Nor beside spared ones.
        assert_eq!(slots.take(vec![0, 2], 8, &used_at, Victims::Newest, 0..6), []);
        assert_eq!(slots.take(vec![0, 2], 8, &used_at, Victims::Newest, 0..4).len(), 1);
    }

    #[test]
    fn experts_from_the_device_are_as_new_as_those_that_were_used() {
        let (mut slots, mut used_at) = (HostSlots::new(2, vec![false; 5]), [0; 5]);
        slots.are_on_device[4] = true;
        for (now, expert) in [(1, 0), (2, 1)] {
            used_at[expert] = now;
            slots.take_used(0..5, now, &used_at);
        }
        assert_eq!(slots.absent(0..5), [2, 3]);
        // The device has taken 0, and 4 had its place there.
        slots.follow(4, [(slots.slot_of[0].unwrap(), 4)]);
        assert_eq!((slots.absent(0..5), slots.are_on_device[0]), (vec![2, 3], true));
        used_at[2] = 4;
        let taken = slots.take_used(0..5, 4, &used_at);
        assert_eq!((taken[0].expert, taken[0].evicted), (2, Some(1)));
        slots.follow(5, [(slots.slot_of[4].unwrap(), 0)]);
        used_at[1] = 5;
        let taken = slots.take_used(0..5, 5, &used_at);
        assert_eq!((taken[0].expert, taken[0].evicted), (1, Some(0)));
        assert_eq!(slots.absent(0..5), [0, 3]);
    }

    #[test]
    fn experts_may_change_places_between_two_requests() {
        let (mut slots, mut used_at) = (HostSlots::new(2, vec![false; 4]), [1, 2, 0, 0]);
        slots.take_used(0..4, 1, &used_at);
        slots.take_used(0..4, 2, &used_at);
        let [first, second] = [0, 1].map(|expert| slots.slot_of[expert].unwrap());
        slots.follow(3, [(second, 0), (first, 1)]);
        assert_eq!([slots.slot_of[0], slots.slot_of[1]], [Some(second), Some(first)]);
        // 0 has gone to the device and come back to the slot of 1, and 3 is where it was.
        slots.follow(4, [(first, 0), (second, 3)]);
        assert_eq!([slots.slot_of[0], slots.slot_of[1]], [Some(first), None]);
        assert_eq!(slots.are_on_device, [false, true, false, false]);
        used_at[0] = 5;
        assert_eq!(slots.take_used(0..4, 5, &used_at), []);
    }

    #[test]
    fn the_clock_may_start_again() {
        let mut used_at = [u32::MAX - 1, u32::MAX, 9, 9];
        let mut slots = HostSlots::new(2, vec![false; 4]);
        assert_eq!(slots.take_used(0..4, u32::MAX - 1, &used_at).len(), 1);
        assert_eq!(slots.take_used(0..4, u32::MAX, &used_at).len(), 1);
        used_at[2] = 1;
        let taken = slots.take_used(0..4, 1, &used_at);
        assert_eq!((taken[0].expert, taken[0].evicted), (2, Some(0)));
        used_at[3] = 2;
        let taken = slots.take_used(0..4, 2, &used_at);
        assert_eq!((taken[0].expert, taken[0].evicted), (3, Some(1)));
    }
}
