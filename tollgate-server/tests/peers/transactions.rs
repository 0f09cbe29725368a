//! Transactions of the Redis protocol, as clients send them: `pipeline()` of redis-py and `multi()` of ioredis and
//! node-redis by default, and a batch of Valkey GLIDE if it is atomic.
//!
//! Each program prints what a transaction of five commands replies, how many units are left after it, and that a
//! transaction with a command that cannot be queued fails and takes nothing.

use std::process::{Command, Output};

use testkit::folder::folder_with;
use testkit::tollgate::{Process, RULES};

use crate::peer::{installed, python};

const LIMITS: &str = "
service: { resp: '127.0.0.1:0' }
limits:
  - { name: per-user, key: 'header:x-user-id', algorithm: token_bucket, capacity: 3, refill: 1/h }
";

const EXPECTED: &str = "\
allowed 0,0,1
left 2
refused
left 2
";

fn check(run: impl FnOnce(u16) -> Output) {
    let server = Process::start(folder_with(&[(RULES, LIMITS)]), &["serve", "--config", RULES]);
    let output = run(server.address_of("decisions redis").port());
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), EXPECTED, "{errors}");
}

/// The remaining units of a reply in either version of the protocol.
const LEFT_IN_PYTHON: &str = "
def left(reply):
    if isinstance(reply, dict):
        reply = {key.decode() if isinstance(key, bytes) else key: value for key, value in reply.items()}
        return reply['remaining']
    return reply[5]
";

#[test]
fn redis_py_sends_a_pipeline_as_a_transaction() {
    if python().is_none() {
        return;
    }
    check(|port| {
        let program = format!(
            "import redis
{LEFT_IN_PYTHON}
client = redis.Redis(port={port})
pipeline = client.pipeline()
for _ in range(3):
    pipeline.execute_command('CL.THROTTLE', 'ann', 1, 1, 3600)
pipeline.ping()
pipeline.execute_command('TOLLGATE.CHECK', 'per-user', 'ann')
replies = pipeline.execute()
print('allowed', ','.join(str(reply[0]) for reply in replies[:3]))
print('left', left(replies[4]))
pipeline.execute_command('TOLLGATE.CHECK', 'per-user', 'ann').get('ann')
try:
    pipeline.execute()
except redis.ResponseError:
    print('refused')
print('left', left(client.execute_command('TOLLGATE.PEEK', 'per-user', 'ann')))
"
        );
        python().expect("it is installed").args(["-c", &program]).output().expect("python3 runs")
    });
}

#[test]
fn glide_sends_an_atomic_batch_as_a_transaction() {
    if python().is_none() || installed("python/glide_sync").is_none() {
        return;
    }
    check(|port| {
        let program = format!(
            "from glide_sync import Batch, GlideClient, GlideClientConfiguration, NodeAddress, RequestError
{LEFT_IN_PYTHON}
client = GlideClient.create(GlideClientConfiguration([NodeAddress('127.0.0.1', {port})]))
batch = Batch(True)
for _ in range(3):
    batch.custom_command(['CL.THROTTLE', 'ann', '1', '1', '3600'])
batch.ping()
batch.custom_command(['TOLLGATE.CHECK', 'per-user', 'ann'])
replies = client.exec(batch, True)
print('allowed', ','.join(str(reply[0]) for reply in replies[:3]))
print('left', left(replies[4]))
batch = Batch(True)
batch.custom_command(['TOLLGATE.CHECK', 'per-user', 'ann'])
batch.get('ann')
try:
    client.exec(batch, True)
except RequestError:
    print('refused')
print('left', left(client.custom_command(['TOLLGATE.PEEK', 'per-user', 'ann'])))
client.close()
"
        );
        python().expect("it is installed").args(["-c", &program]).output().expect("python3 runs")
    });
}

/// The remaining units of a reply in either version of the protocol.
const LEFT_IN_JAVASCRIPT: &str = "const left = reply => Array.isArray(reply) ? reply[5] : reply.remaining;";

fn node(program: &str) -> Output {
    let modules = installed("node/node_modules").expect("it is installed");
    Command::new("node").env("NODE_PATH", modules).args(["-e", program]).output().expect("node runs")
}

#[test]
fn ioredis_sends_a_transaction() {
    if installed("node/node_modules").is_none() {
        return;
    }
    check(|port| {
        node(&format!(
            "const {{ Redis }} = require('ioredis');
{LEFT_IN_JAVASCRIPT}
(async () => {{
  const client = new Redis({port});
  const transaction = client.multi();
  for (let i = 0; i < 3; i++) transaction.call('CL.THROTTLE', 'ann', 1, 1, 3600);
  const replies = await transaction.ping().call('TOLLGATE.CHECK', 'per-user', 'ann').exec();
  console.log('allowed', replies.slice(0, 3).map(([, reply]) => reply[0]).join());
  console.log('left', left(replies[4][1]));
  await client.multi().call('TOLLGATE.CHECK', 'per-user', 'ann').get('ann').exec().catch(() => console.log('refused'));
  console.log('left', left(await client.call('TOLLGATE.PEEK', 'per-user', 'ann')));
  await client.quit();
}})();"
        ))
    });
}

#[test]
fn node_redis_sends_a_transaction() {
    if installed("node/node_modules").is_none() {
        return;
    }
    check(|port| {
        node(&format!(
            "const {{ createClient }} = require('redis');
{LEFT_IN_JAVASCRIPT}
(async () => {{
  const client = await createClient({{ url: 'redis://127.0.0.1:{port}' }}).connect();
  const transaction = client.multi();
  for (let i = 0; i < 3; i++) transaction.addCommand(['CL.THROTTLE', 'ann', '1', '1', '3600']);
  const replies = await transaction.ping().addCommand(['TOLLGATE.CHECK', 'per-user', 'ann']).exec();
  console.log('allowed', replies.slice(0, 3).map(reply => reply[0]).join());
  console.log('left', left(replies[4]));
  const refused = client.multi().addCommand(['TOLLGATE.CHECK', 'per-user', 'ann']).get('ann').exec();
  await refused.catch(() => console.log('refused'));
  console.log('left', left(await client.sendCommand(['TOLLGATE.PEEK', 'per-user', 'ann'])));
  await client.close();
}})();"
        ))
    });
}
