//! The selection of the entries with the highest scores.

/// Writes the numbers of the highest scores, ascending, then -1. Ties go to the lower number.
/// `sorted` is as long as `scores`.
pub(crate) fn select(scores: &[f32], sorted: &mut [f32], out: &mut [f32]) {
    let count = scores.len().min(out.len());
    out[count..].fill(-1.0);
    if count == scores.len() {
        out.iter_mut().zip(0..count).for_each(|(out, number)| *out = number as f32);
        return;
    }
    sorted.copy_from_slice(scores);
    let (lower, &mut least, _) =
        sorted.select_nth_unstable_by(scores.len() - count, f32::total_cmp);
    // Of the scores that are equal to the least selected one, those below it are left out.
    let equal_above = scores.len() - count - lower.iter().filter(|x| is_below(**x, least)).count();
    let equal = scores.iter().filter(|x| x.total_cmp(&least).is_eq()).count();
    let mut equal_left = equal - equal_above;
    let mut next = 0;
    for (number, score) in scores.iter().enumerate() {
        let is_selected = match score.total_cmp(&least) {
            std::cmp::Ordering::Less => false,
            std::cmp::Ordering::Greater => true,
            std::cmp::Ordering::Equal if equal_left > 0 => {
                equal_left -= 1;
                true
            }
            std::cmp::Ordering::Equal => false,
        };
        if is_selected {
            out[next] = number as f32;
            next += 1;
        }
    }
}

fn is_below(x: f32, least: f32) -> bool {
    x.total_cmp(&least).is_lt()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(scores: &[f32], count: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; count];
        select(scores, &mut vec![0.0; scores.len()], &mut out);
        out
    }

    #[test]
    fn the_highest_are_selected_and_ties_go_to_the_lower() {
        assert_eq!(run(&[1.0, 5.0, 3.0, 5.0, 2.0], 3), [1.0, 2.0, 3.0]);
        assert_eq!(run(&[0.0, 7.0, 0.0, 0.0, 0.0], 3), [0.0, 1.0, 2.0]);
        assert_eq!(run(&[2.0, 1.0, 2.0, 2.0], 2), [0.0, 2.0]);
        assert_eq!(run(&[2.0, 1.0], 4), [0.0, 1.0, -1.0, -1.0]);
        assert_eq!(run(&[f32::NAN, 1.0, f32::NAN], 2).len(), 2);
    }
}
