//! Recipes for common tasks. This module contains documentation only.
//!
//! - [Send your own 429 response](#send-your-own-429-response)
//! - [Read the remaining quota in a handler](#read-the-remaining-quota-in-a-handler)
//! - [Give each plan its own quota](#give-each-plan-its-own-quota)
//! - [Control the clock](#control-the-clock)
//! - [Test code that is rate limited](#test-code-that-is-rate-limited)
//!
//! # Send your own 429 response
//!
//! [`refuse_with`](crate::RateLimitLayer::refuse_with) gets the standard response with its status, `Retry-After`
//! and rate-limit headers. Change it, or return another one:
//!
//! ```
//! use axum::{Router, routing::get};
//! use http::{HeaderValue, Response, header::CONTENT_TYPE};
//! use tollgate_tower::RateLimitLayer;
//! use tollgate::{Limit, Rate, TokenBucket};
//!
//! let limit = Limit::new("per-client", TokenBucket::new(100, Rate::per_second(10)))?;
//! let layer = RateLimitLayer::per_ip(limit)?.refuse_with(|_outcome, _request, standard| {
//!     let (mut head, _body) = standard.into_parts();
//!     head.headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
//!     Response::from_parts(head, "Slow down.".into())
//! });
//! let app: Router = Router::new().route("/", get(async || "hello")).layer(layer.for_axum());
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! # Read the remaining quota in a handler
//!
//! [`share_decision`](crate::RateLimitLayer::share_decision) adds the decision to the request, and
//! [`LimitDecision`](crate::LimitDecision) extracts it:
//!
//! ```
//! use axum::{Router, routing::get};
//! use tollgate_tower::{LimitDecision, RateLimitLayer};
//! use tollgate::{Limit, Rate, TokenBucket};
//!
//! async fn quota(decision: LimitDecision) -> String {
//!     format!("{} of {} requests left\n", decision.remaining(), decision.quota())
//! }
//!
//! let limit = Limit::new("per-client", TokenBucket::new(100, Rate::per_second(10)))?;
//! let layer = RateLimitLayer::per_ip(limit)?.share_decision().for_axum();
//! let app: Router = Router::new().route("/quota", get(quota)).layer(layer);
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! # Give each plan its own quota
//!
//! With a [`Limiter`](tollgate::Limiter), a plan is a [variant](tollgate::LimitSet::variant) of a limit. A user who changes
//! plans keeps the units already spent:
//!
//! ```
//! use tollgate::{FixedWindow, Hit, Limit, Limiter, MINUTE};
//!
//! let limiter = Limiter::builder()
//!     .limit(Limit::new("per-user", FixedWindow::new(10, MINUTE))?)
//!     .variant("gold", Limit::new("per-user", FixedWindow::new(1000, MINUTE))?)
//!     .build()?;
//! let limit_of = |plan: &str| limiter.variant("per-user", plan).or(limiter.id("per-user")).unwrap();
//! assert_eq!(limiter.decide_now(&[Hit::new(limit_of("free"), "ann")]).remaining(), 9);
//! assert_eq!(limiter.decide_now(&[Hit::new(limit_of("gold"), "bob")]).remaining(), 999);
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! With a [`Gate`](tollgate_rules::Gate), a rule finds the plan in the request. Take it from a verified source, such as a token
//! or an extension that your authentication layer sets: clients must not choose their plan.
//!
//! ```
//! use tollgate::{FixedWindow, Limit, MINUTE};
//! use tollgate_rules::{Gate, KeyPart, Rule, RuleSet};
//!
//! #[derive(Clone)]
//! struct Account {
//!     user: String,
//!     plan: String,
//! }
//!
//! let per_user = Rule::new(Limit::new("per-user", FixedWindow::new(10, MINUTE))?)
//!     .key(KeyPart::custom(|request| Some(request.facts().extension::<Account>()?.user.clone())))
//!     .plan(KeyPart::custom(|request| Some(request.facts().extension::<Account>()?.plan.clone())))
//!     .plan_limit("gold", FixedWindow::new(1000, MINUTE));
//! let gate = Gate::in_memory(RuleSet::builder().rule(per_user).build()?)?;
//! # let _ = gate;
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! # Control the clock
//!
//! A [`ManualClock`](tollgate::ManualClock) moves only when you move it. Limiters and gates accept it:
//!
//! ```
//! use tollgate::{FixedWindow, Limit, Limiter, ManualClock, Timestamp, MINUTE};
//! use tollgate_rules::{Gate, Rule, RuleSet};
//!
//! let clock = ManualClock::at(Timestamp::from_secs(1_700_000_000));
//! let limit = Limit::new("all", FixedWindow::new(10, MINUTE))?;
//! let limiter = Limiter::builder().limit(limit.clone()).clock(clock.clone()).build()?;
//! let rules = RuleSet::builder().rule(Rule::new(limit)).build()?;
//! let gate = Gate::with_limiter(rules, Limiter::builder().clock(clock.clone()))?;
//! clock.advance(MINUTE);
//! # let _ = (limiter, gate);
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! # Test code that is rate limited
//!
//! Move the clock instead of sleeping. `retry_after` is exact, so a test can assert it:
//!
//! ```
//! use std::time::Duration;
//! use tollgate::{Limit, Limiter, ManualClock, Rate, Timestamp, TokenBucket};
//!
//! let clock = ManualClock::at(Timestamp::from_secs(1_700_000_000));
//! let limit = Limit::new("mails", TokenBucket::new(1, Rate::per_second(2)))?;
//! let limiter = Limiter::builder().limit(limit).clock(clock.clone()).build()?;
//! assert!(limiter.check("ann").is_allowed());
//! let denied = limiter.check("ann");
//! assert_eq!(denied.retry_after(), Some(Duration::from_millis(500)));
//! clock.advance(Duration::from_millis(500));
//! assert!(limiter.check("ann").is_allowed());
//! # Ok::<(), tollgate::InvalidLimit>(())
//! ```
//!
//! Code that is generic over [`RateLimiter`](tollgate::RateLimiter) runs on Redis in production and in memory in tests.
