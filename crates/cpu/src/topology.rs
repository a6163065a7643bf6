//! How many cores this process may really use.
//!
//! Workers beyond that number do not help: they take turns on the same cores and every barrier waits for one
//! that is not running.

use std::fs;

/// Cores in the affinity mask, cut to the CPU quota of the control group; at least 1.
pub fn available_cores() -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    // The standard library reads quotas too; reading them here as well keeps the rule in one visible place and
    // covers quotas that are set on a group further up.
    quota_of(&fs::read_to_string("/proc/self/cgroup").unwrap_or_default(), |path| {
        fs::read_to_string(path).ok()
    })
    .map_or(cores, |quota| cores.min(quota.floor().max(1.0) as usize))
}

/// The smallest CPU quota, in cores, of the group in `/proc/self/cgroup`'s text and of those above it.
fn quota_of(cgroup: &str, read: impl Fn(&str) -> Option<String>) -> Option<f64> {
    let mut least: Option<f64> = None;
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let mut path = path.trim_end_matches('/');
        loop {
            let quota = if controllers.is_empty() {
                read(&format!("/sys/fs/cgroup{path}/cpu.max")).and_then(|text| quota_v2(&text))
            } else if controllers.split(',').any(|c| c == "cpu") {
                let value = |name| read(&format!("/sys/fs/cgroup/cpu{path}/{name}"));
                quota_v1(value("cpu.cfs_quota_us"), value("cpu.cfs_period_us"))
            } else {
                None
            };
            if let Some(quota) = quota {
                least = Some(least.map_or(quota, |l| l.min(quota)));
            }
            match path.rfind('/') {
                Some(cut) => path = &path[..cut],
                None => break,
            }
        }
    }
    least
}

/// `"150000 100000"` is 1.5 cores, `"max 100000"` no limit.
fn quota_v2(text: &str) -> Option<f64> {
    let mut fields = text.split_whitespace();
    let quota: f64 = fields.next()?.parse().ok()?;
    let period: f64 = fields.next()?.parse().ok()?;
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

fn quota_v1(quota: Option<String>, period: Option<String>) -> Option<f64> {
    let quota: f64 = quota?.trim().parse().ok()?;
    let period: f64 = period?.trim().parse().ok()?;
    (quota > 0.0 && period > 0.0).then_some(quota / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_quota_on_the_path_counts() {
        let read = |path: &str| match path {
            "/sys/fs/cgroup/a/b/cpu.max" => Some("400000 100000\n".to_string()),
            "/sys/fs/cgroup/a/cpu.max" => Some("150000 100000\n".to_string()),
            "/sys/fs/cgroup/cpu.max" => Some("max 100000\n".to_string()),
            _ => None,
        };
        assert_eq!(quota_of("0::/a/b\n", read), Some(1.5));
        assert_eq!(quota_of("0::/\n", read), None);
    }

    #[test]
    fn the_older_control_groups_are_read() {
        let read = |path: &str| match path {
            "/sys/fs/cgroup/cpu/job/cpu.cfs_quota_us" => Some("200000\n".to_string()),
            "/sys/fs/cgroup/cpu/job/cpu.cfs_period_us" => Some("100000\n".to_string()),
            "/sys/fs/cgroup/cpu/cpu.cfs_quota_us" => Some("-1\n".to_string()),
            "/sys/fs/cgroup/cpu/cpu.cfs_period_us" => Some("100000\n".to_string()),
            _ => None,
        };
        assert_eq!(quota_of("4:memory:/job\n3:cpu,cpuacct:/job\n", read), Some(2.0));
    }

    #[test]
    fn there_is_always_a_core() {
        assert!(available_cores() >= 1);
    }
}
