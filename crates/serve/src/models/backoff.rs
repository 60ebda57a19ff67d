//! When a model that has failed may be loaded again: the wait doubles with every failure.

use std::time::{Duration, Instant};

const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(60);

/// The wait from the end of a load to the next one.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    wait: Duration,
    /// When the next load may begin.
    next: Option<Instant>,
}

impl Backoff {
    /// Notes that a load begins.
    pub(super) fn begin(&mut self, now: Instant) {
        // A model that worked until long after its last load has recovered from that failure.
        let has_recovered = self.next.is_none_or(|next| now > next + LONGEST);
        self.wait = if has_recovered { SHORTEST } else { (self.wait * 2).min(LONGEST) };
    }

    /// Notes that it ends.
    pub(super) fn end(&mut self, now: Instant) {
        self.next = Some(now + self.wait);
    }

    /// When the next load may begin: now, if there was none.
    pub(super) fn next(&self) -> Instant {
        self.next.unwrap_or_else(Instant::now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_doubles_until_a_model_works_for_a_while() {
        let (mut backoff, mut now) = (Backoff::default(), Instant::now());
        assert!(backoff.next() >= now);
        // Loads that take longer than the longest wait do not look like a recovery.
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            backoff.begin(now);
            now += Duration::from_secs(100);
            backoff.end(now);
            assert_eq!(backoff.next(), now + Duration::from_secs(seconds));
            now = backoff.next();
        }
        now += 2 * LONGEST;
        backoff.begin(now);
        backoff.end(now);
        assert_eq!(backoff.next(), now + SHORTEST);
    }
}
