//! The built-in rule file of `tollgate serve` without `--config`: 10 requests per minute for each user.

use tollgate_config::{Parsed, Problems, RuleFile};

const TEXT: &str = "
gateway:
  listen: 127.0.0.1:8080
  routes:
    - path: /**
      upstream: echo
admin:
  listen: 127.0.0.1:8099
limits:
  - name: per-user
    key: header:x-user-id
";

pub(crate) fn rules() -> Result<Parsed, Problems> {
    RuleFile::parse("the built-in rules", TEXT)
}
