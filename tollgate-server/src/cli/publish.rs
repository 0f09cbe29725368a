//! `tollgate publish`: one rule file to every node that shares its Redis.

use tollgate::redis::{PublishError, RuleSets};
use tollgate::rules::file::StoreUrl;

use super::{ConfigArgument, Error, Outcome, load, say};
use crate::notice;

#[derive(clap::Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    config: ConfigArgument,
    /// Publish only if this version is the newest (0: none was published yet); else the answer is no
    #[arg(long, value_name = "VERSION")]
    expect: Option<u64>,
}

pub(super) async fn run(arguments: &Arguments) -> Result<Outcome, Error> {
    let path = &arguments.config.config;
    let file = load(path)?;
    file.compile().map_err(|problems| Error::Open(problems.into()))?;
    let StoreUrl::Redis(url) = &file.store else {
        return Err(Error::NoFleet { config: path.clone() });
    };
    let rule_sets = RuleSets::connect(url).map_err(Error::Connect)?;
    match rule_sets.publish(file.source().as_bytes(), arguments.expect).await {
        Ok(version) => {
            say(format_args!("{} is published as version {version}", path.display()));
            Ok(Outcome::Yes)
        }
        Err(error @ PublishError::Conflict { .. }) => {
            notice::tell(error);
            Ok(Outcome::No)
        }
        Err(error) => Err(Error::Publish(error)),
    }
}
