"""The statements on our tables, and what goes with them: in the order in which a job meets them.

What stands elsewhere touches no row: the DDL of the migrations, and SAVEPOINT, LISTEN and SET where a
transaction or a session is looked after.

Conventions. A status is always a literal, so that partial indexes match in prepared statements too;
everything else is bound. `statement_timestamp()` is the only clock. Statements that touch several rows lock
them in a MATERIALIZED common table expression, skipping what somebody else has locked: so they neither hang,
nor deadlock, nor take more rows than asked for (REQUEST_STOP says why it waits). Whoever writes on behalf of
a claim passes the guard: id, token, attempts, and status = 'processing'. A row may have been written by
anyone: no value that its columns can hold may make a statement fail, since one bad row would stop all others.

Rows are looked up by id, whatever the planner believes: a plan made while the table was empty would else read
all that is being processed. Hence three habits. `job.id = ANY (ARRAY(SELECT ...))` goes through the primary
key where a join may go through anything; `AND job.id = held.id` beside it only brings the other columns of
`held` along. A LATERAL subquery looks up each of the given rows by itself. And OFFSET 0, or FOR UPDATE, keeps
the planner from turning a subquery into a join.
"""

from __future__ import annotations

# ── Our own transactions ──────────────────────────────────────────────────────────────────────────────────

# Nothing of this outlives the transaction. A generic plan knows no limit, so its estimate is high enough to
# start the JIT compiler (430 ms for a claim of 3 ms); a table that was empty when a plan was made must not be
# read from end to end once it is full; and a bitmap forgets the order of an index, so that a batch would cost
# as much as the whole backlog.
PLANNER = """
SELECT set_config('jit', 'off', true), set_config('enable_seqscan', 'off', true),
       set_config('enable_bitmapscan', 'off', true)
"""

# The same for a worker host's own connection, in one round trip, with limits in milliseconds. A host that is
# stopped between two statements gives up its locks when its claims are lost, and not before. One plan is good
# for all parameters: to make one for each claim took three times as long as the claim (0.75 and 0.25 ms).
BEGIN = """
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL jit = off;
SET LOCAL enable_seqscan = off;
SET LOCAL enable_bitmapscan = off;
SET LOCAL plan_cache_mode = force_generic_plan;
SET LOCAL statement_timeout = {statement};
SET LOCAL lock_timeout = {lock};
SET LOCAL idle_in_transaction_session_timeout = {idle}
"""

# From PostgreSQL 17 on, a role may also have this limit, which knows nothing of ours.
BEGIN_17 = f"{BEGIN}; SET LOCAL transaction_timeout = 0"

# ── Notifications ─────────────────────────────────────────────────────────────────────────────────────────

# The triggers send notifications unless a host is there and none wants to be told, since each commit that
# carries one waits for all others. Both are said with advisory locks, shared, of the session that listens: so
# they end with it, however it ends. That a trigger finds out by trying an exclusive one, for a microsecond,
# needs no privilege, and no table that it might not find.
HOST_IS_HERE = "1785688435, 1"  # "joqs" in ASCII, so that nobody else's lock is ours
HOST_WANTS_TO_BE_TOLD = "1785688435, 2"

HEAR = f"""
SELECT pg_advisory_lock_shared({HOST_IS_HERE}), pg_advisory_lock_shared({HOST_WANTS_TO_BE_TOLD})
"""
WANT = f"SELECT pg_advisory_lock_shared({HOST_WANTS_TO_BE_TOLD})"
WANT_NO_MORE = f"SELECT pg_advisory_unlock_shared({HOST_WANTS_TO_BE_TOLD})"

# ── Enqueueing ────────────────────────────────────────────────────────────────────────────────────────────

# → queued. Delays are added to the database's clock. Returns the row as the handle needs it.
ENQUEUE = """
INSERT INTO background_jobs
       (queue_name, job_name, payload, priority, run_at, max_attempts, rerun_if_lost, metadata)
VALUES (%(queue_name)s, %(job_name)s, %(payload)s::jsonb, %(priority)s,
        COALESCE(%(run_at)s::timestamptz, statement_timestamp() + %(delay)s::interval),
        %(max_attempts)s, %(rerun_if_lost)s, %(metadata)s::jsonb)
RETURNING id, run_at, created_at
"""

# → queued, one row for each line of %(payloads)s, in their order. Returns the ids. A payload has no line
# breaks, and joined lines cost the client a tenth of what an array of texts does.
ENQUEUE_MANY = """
INSERT INTO background_jobs
       (queue_name, job_name, payload, priority, run_at, max_attempts, rerun_if_lost, metadata)
SELECT %(queue_name)s, %(job_name)s, given.payload::jsonb, %(priority)s,
       COALESCE(%(run_at)s::timestamptz, statement_timestamp() + %(delay)s::interval),
       %(max_attempts)s, %(rerun_if_lost)s, %(metadata)s::jsonb
  FROM string_to_table(%(payloads)s, E'\n') WITH ORDINALITY AS given (payload, position)
 ORDER BY given.position
RETURNING id
"""

# What follows is for jobs with a unique key: one row for each key, in the order of %(keys)s. Whoever inserts
# several has them sorted, so that two who want the same keys wait for each other and never deadlock. An equal
# key that somebody has inserted, and not committed, is waited for: only then is it known who has it. Statuses
# and the predicate are those of the index uq_jobs_unique_key, which decides.
_ENQUEUE_UNIQUE = """
INSERT INTO background_jobs AS job
       (queue_name, job_name, payload, priority, run_at, max_attempts, rerun_if_lost, metadata, unique_key)
SELECT %(queue_name)s, %(job_name)s, given.payload::jsonb, %(priority)s,
       COALESCE(%(run_at)s::timestamptz, statement_timestamp() + %(delay)s::interval),
       %(max_attempts)s, %(rerun_if_lost)s, %(metadata)s::jsonb, given.key
  FROM unnest(%(keys)s::text[], %(payloads)s::text[]) WITH ORDINALITY AS given (key, payload, position)
 ORDER BY given.position
    ON CONFLICT (job_name, unique_key)
 WHERE unique_key IS NOT NULL AND status IN ('queued', 'processing')
       <resolution>
RETURNING job.unique_key, job.xmax = 0, job.id, job.queue_name, job.status::text, job.priority, job.run_at,
          job.attempts, job.max_attempts, job.rerun_if_lost, job.created_at, NULL
"""

# → queued, where no job with the key waits or runs. Returns the new rows, and nothing for the other keys.
ENQUEUE_OR_KEEP = _ENQUEUE_UNIQUE.replace("<resolution>", "DO NOTHING")

# → queued, where no job with the key waits. One that is processing loses its key, and is returned without it:
# the statement has to be repeated for that key, of which nobody else can take possession any more. A job that
# waits is not returned. It stays locked until the transaction ends, so that no worker starts it before it can
# see what the transaction has written.
ENQUEUE_OR_FREE = _ENQUEUE_UNIQUE.replace(
    "<resolution>",
    """DO UPDATE
   SET unique_key = NULL
 WHERE job.status = 'processing'""",
)

# The same, but a job that waits gets the arguments, and the metadata that came with them; with %(debounce)s,
# its time to run moves that far from now, at most %(max_wait)s from its creation, and never forward. It is
# returned, too. Of a row that was inserted, xmax is zero; of one that this statement found, it is not.
ENQUEUE_OR_REPLACE = _ENQUEUE_UNIQUE.replace(
    "<resolution>",
    """DO UPDATE
   SET unique_key = CASE WHEN job.status = 'queued' THEN job.unique_key END,
       payload = CASE WHEN job.status = 'queued' THEN excluded.payload ELSE job.payload END,
       metadata = CASE WHEN job.status <> 'queued' THEN job.metadata
                       WHEN jsonb_typeof(job.metadata) = 'object' THEN job.metadata || excluded.metadata
                       ELSE excluded.metadata END,
       run_at = CASE WHEN job.status = 'queued'
                     THEN GREATEST(job.run_at, LEAST(statement_timestamp() + %(debounce)s::interval,
                                                     job.created_at + %(max_wait)s::interval))
                     ELSE job.run_at END""",
)

# For each key the job that waits or runs, if there is one.
LIVE = """
SELECT job.*
  FROM unnest(%(keys)s::text[]) AS given (key)
 CROSS JOIN LATERAL (
       SELECT job.unique_key, false, job.id, job.queue_name, job.status::text, job.priority, job.run_at,
              job.attempts, job.max_attempts, job.rerun_if_lost, job.created_at, job.payload::text
         FROM background_jobs AS job
        WHERE job.job_name = %(job_name)s
          AND job.unique_key = given.key
          AND job.status IN ('queued', 'processing')
       OFFSET 0) AS job
"""

# For each key the latest job that was created within %(period)s, whatever became of it, those that were
# cancelled and those in %(but)s apart.
RECENT = """
SELECT job.*
  FROM unnest(%(keys)s::text[]) AS given (key)
 CROSS JOIN LATERAL (
       SELECT job.unique_key, false, job.id, job.queue_name, job.status::text, job.priority, job.run_at,
              job.attempts, job.max_attempts, job.rerun_if_lost, job.created_at, job.payload::text
         FROM background_jobs AS job
        WHERE job.job_name = %(job_name)s
          AND job.unique_key IS NOT NULL
          AND job.unique_key = given.key
          AND job.created_at > statement_timestamp() - %(period)s::interval
          AND job.status <> 'cancelled'
          AND job.id <> ALL (%(but)s::bigint[])
        ORDER BY job.created_at DESC
        LIMIT 1) AS job
"""

# The isolation level of the transaction.
ISOLATION = """
SELECT current_setting('transaction_isolation')
"""

# ── Schedules ─────────────────────────────────────────────────────────────────────────────────────────────

# False when another host writes down its schedules just now.
DECLARE_LOCK = """
SELECT pg_try_advisory_xact_lock('background_jobs'::regclass::oid::integer, 2)
"""

# Of the given schedules that code declares, those that are not in the table as given; without a lock.
# `is_taken`: one that was made by people has that name. `keeps_time`: its next tick stays what it is.
UNDECLARED = """
SELECT given.name,
       COALESCE(NOT schedule.declared, false) AS is_taken,
       COALESCE((schedule.cron, schedule.interval, schedule.timezone)
                IS NOT DISTINCT FROM (given.cron, given.seconds * interval '1 second', given.timezone),
                false) AS keeps_time,
       statement_timestamp()
  FROM unnest(%(names)s::text[], %(job_names)s::text[], %(payloads)s::text[], %(crons)s::text[],
              %(seconds)s::float8[], %(timezones)s::text[], %(missed)s::text[], %(overlaps)s::boolean[])
       AS given (name, job_name, payload, cron, seconds, timezone, missed, overlap)
  LEFT JOIN background_schedules AS schedule ON schedule.name = given.name
 WHERE schedule.name IS NULL
    OR (schedule.declared, schedule.job_name, schedule.payload, schedule.cron, schedule.interval,
        schedule.timezone, schedule.missed, schedule.overlap)
       IS DISTINCT FROM
       (true, given.job_name, given.payload::jsonb, given.cron, given.seconds * interval '1 second',
        given.timezone, given.missed, given.overlap)
 ORDER BY given.name
"""

# Write down a schedule that code declares. Whether it is enabled, and what its last tick was, stays. Returns
# its name, unless somebody has locked it just now, or people have made one of that name.
DECLARE = """
WITH held AS MATERIALIZED (
    SELECT schedule.name
      FROM background_schedules AS schedule
     WHERE schedule.name = %(name)s
       AND schedule.declared
       FOR UPDATE SKIP LOCKED
), updated AS (
    UPDATE background_schedules AS schedule
       SET job_name = %(job_name)s,
           payload = %(payload)s::jsonb,
           cron = %(cron)s,
           interval = %(seconds)s::float8 * interval '1 second',
           timezone = %(timezone)s,
           missed = %(missed)s,
           overlap = %(overlap)s,
           next_tick_at = CASE WHEN %(keeps_time)s::boolean THEN schedule.next_tick_at
                               ELSE %(next_tick_at)s::timestamptz END,
           changed_by = '',
           updated_at = statement_timestamp()
     WHERE schedule.name = ANY (ARRAY(SELECT held.name FROM held))
    RETURNING schedule.name
), inserted AS (
    INSERT INTO background_schedules
           (name, job_name, payload, cron, interval, timezone, missed, overlap, declared, next_tick_at)
    VALUES (%(name)s, %(job_name)s, %(payload)s::jsonb, %(cron)s, %(seconds)s::float8 * interval '1 second',
            %(timezone)s, %(missed)s, %(overlap)s, true, %(next_tick_at)s::timestamptz)
        ON CONFLICT (name) DO NOTHING
    RETURNING name
)
SELECT name FROM updated
 UNION ALL
SELECT name FROM inserted
"""

# Schedules that are due or have no next tick, locked, at most %(limit)s: of those that are enabled, whose job
# function is known, and which, where code has declared them, it still does.
#
# Returns one row at least: the clock; in how many seconds one of all the others is due, or null where there
# is none; and the schedule, or nulls. One that somebody has locked is worth another look in a second.
DUE_SCHEDULES = """
WITH known AS MATERIALIZED (
    SELECT schedule.name, schedule.next_tick_at,
           (schedule.next_tick_at > statement_timestamp()) IS NOT TRUE AS is_due
      FROM background_schedules AS schedule
     WHERE schedule.enabled
       AND schedule.job_name = ANY (%(job_names)s::text[])
       AND (NOT schedule.declared OR schedule.name = ANY (%(declared)s::text[]))
       AND schedule.name <> ALL (%(avoided)s::text[])
), due AS MATERIALIZED (
    SELECT schedule.name, schedule.job_name,
           CASE WHEN octet_length(schedule.payload::text) <= %(largest)s
                THEN schedule.payload::text END AS payload,
           schedule.cron, EXTRACT(EPOCH FROM schedule.interval)::float8 AS seconds, schedule.timezone,
           schedule.missed, schedule.overlap, schedule.last_tick, schedule.next_tick_at
      FROM background_schedules AS schedule
     WHERE schedule.name = ANY (ARRAY(SELECT known.name
                                        FROM known
                                       WHERE known.is_due
                                       ORDER BY known.next_tick_at NULLS FIRST
                                       LIMIT %(limit)s))
       AND schedule.enabled
       AND (schedule.next_tick_at > statement_timestamp()) IS NOT TRUE
       FOR UPDATE SKIP LOCKED
), others AS (
    SELECT min(CASE WHEN known.is_due THEN 1.0
                    ELSE EXTRACT(EPOCH FROM known.next_tick_at - statement_timestamp()) END)::float8 AS wait
      FROM known
     WHERE known.name NOT IN (SELECT due.name FROM due)
)
SELECT statement_timestamp(), others.wait, due.*
  FROM others
  LEFT JOIN due ON true
"""

# Put down the next tick of a schedule that is locked, and nothing else.
PLAN = """
UPDATE background_schedules AS schedule
   SET next_tick_at = %(next_tick_at)s
 WHERE schedule.name = %(name)s
"""

# → queued, one job for each of the ticks, in their order; and the schedule moves on with them, or neither.
# Nothing happens unless all of them come after its last tick: so no tick has a second job, whoever writes
# what into the table. Where jobs must not overlap, a unique key keeps all but the first from being inserted.
# Returns how many were inserted, or no row.
TICK = """
WITH moved AS (
    UPDATE background_schedules AS schedule
       SET last_tick = %(last_tick)s,
           next_tick_at = %(next_tick_at)s
     WHERE schedule.name = %(name)s
       AND (schedule.last_tick >= %(first_tick)s) IS NOT TRUE
    RETURNING schedule.payload
), inserted AS (
    INSERT INTO background_jobs
           (queue_name, job_name, payload, priority, max_attempts, rerun_if_lost, unique_key, metadata)
    SELECT %(queue_name)s, %(job_name)s, moved.payload, %(priority)s, %(max_attempts)s, %(rerun_if_lost)s,
           %(unique_key)s, %(metadata)s::jsonb || jsonb_build_object('schedule', %(name)s::text,
                                                                     'tick', tick.text)
      FROM moved
     CROSS JOIN unnest(%(ticks)s::text[]) WITH ORDINALITY AS tick (text, position)
     ORDER BY tick.position
        ON CONFLICT (job_name, unique_key)
           WHERE unique_key IS NOT NULL AND status IN ('queued', 'processing') DO NOTHING
    RETURNING id
)
SELECT (SELECT count(*) FROM inserted) FROM moved
"""

# → queued: a job of a schedule, because a person wants one now. The schedule stays as it is. Returns the id,
# or no row when jobs must not overlap and there is one.
RUN_NOW = """
INSERT INTO background_jobs
       (queue_name, job_name, payload, priority, max_attempts, rerun_if_lost, unique_key, metadata)
SELECT %(queue_name)s, %(job_name)s, schedule.payload, %(priority)s, %(max_attempts)s, %(rerun_if_lost)s,
       %(unique_key)s, %(metadata)s::jsonb || jsonb_build_object('schedule', schedule.name)
  FROM background_schedules AS schedule
 WHERE schedule.name = %(name)s
    ON CONFLICT (job_name, unique_key)
       WHERE unique_key IS NOT NULL AND status IN ('queued', 'processing') DO NOTHING
RETURNING id
"""

# Enable or disable a schedule, and wake hosts up. Ticks from before %(next_tick_at)s are not made up for.
# Returns its name if it was otherwise before.
ENABLE = """
WITH changed AS (
    UPDATE background_schedules AS schedule
       SET enabled = %(enabled)s,
           next_tick_at = %(next_tick_at)s,
           changed_by = %(changed_by)s,
           updated_at = statement_timestamp()
     WHERE schedule.name = %(name)s
       AND schedule.enabled <> %(enabled)s
    RETURNING schedule.name
)
SELECT changed.name
  FROM changed
 CROSS JOIN (SELECT pg_notify('job_commands', '')) AS notified
"""

# Wake hosts up to look at the schedules.
ANNOUNCE_SCHEDULES = """
SELECT pg_notify('job_commands', '')
"""

# ── Claiming ──────────────────────────────────────────────────────────────────────────────────────────────

# queued, due → processing, at most %(limit)s rows.
#
# `levels` walks the claim index from the first job of one (queue, priority) to that of the next, three
# buffers a step, so that the cost depends on neither the backlog nor what is due later. With %(queues)s only
# these queues are walked, and the order in which they are listed is their precedence; with NULL all are
# walked, and the queues after %(after)s go first, so that equal priorities take turns. `due` then reads each
# level in order, from that job on, and stops, and stops locking, at the limit; `placed` numbers them, since
# an UPDATE returns its rows in no order.
#
# Jobs that were claimed before stay in the index as long as anybody has an old snapshot, and to step over
# them is what a claim then costs. So a host may say how far its claims have come at each level, by arrays of
# queues, priorities, epochs and ids; then the jobs after that are claimed, at these levels. What has come in
# before or elsewhere is not missed as long as the next claims start from the beginning again. From where each
# level starts is told along with the first row of a claim from the beginning that was not fast.
#
# Returns a claim in each row, with its priority and run_at, and `next_due`. When fewer jobs than the limit
# were found, one more row comes last, which has nothing else: in how many seconds the next job is due, or
# null when none is waiting.
CLAIM = """
WITH RECURSIVE levels (queue_name, priority, run_at, id) AS (
    (
        (SELECT job.queue_name, job.priority, job.run_at, job.id
           FROM background_jobs AS job
          WHERE job.status = 'queued'
            AND %(queues)s::text[] IS NULL
            AND %(reached_ids)s::bigint[] IS NULL
          ORDER BY job.queue_name, job.priority DESC, job.run_at, job.id
          LIMIT 1)
        UNION ALL
        SELECT highest.queue_name, highest.priority, highest.run_at, highest.id
          FROM (SELECT unnest(%(queues)s::text[])
                 WHERE %(reached_ids)s::bigint[] IS NULL) AS listed (queue_name)
         CROSS JOIN LATERAL (
               SELECT job.queue_name, job.priority, job.run_at, job.id
                 FROM background_jobs AS job
                WHERE job.status = 'queued'
                  AND job.queue_name = listed.queue_name
                ORDER BY job.priority DESC, job.run_at, job.id
                LIMIT 1) AS highest
    )
    UNION ALL
    SELECT next.queue_name, next.priority, next.run_at, next.id
      FROM levels
     CROSS JOIN LATERAL (
           (SELECT job.queue_name, job.priority, job.run_at, job.id
              FROM background_jobs AS job
             WHERE job.status = 'queued'
               AND job.queue_name = levels.queue_name
               AND job.priority < levels.priority
             ORDER BY job.priority DESC, job.run_at, job.id
             LIMIT 1)
           UNION ALL
           (SELECT job.queue_name, job.priority, job.run_at, job.id
              FROM background_jobs AS job
             WHERE job.status = 'queued'
               AND job.queue_name > levels.queue_name
               AND %(queues)s::text[] IS NULL
             ORDER BY job.queue_name, job.priority DESC, job.run_at, job.id
             LIMIT 1)
           LIMIT 1) AS next
), reached AS MATERIALIZED (
    SELECT levels.queue_name, levels.priority, levels.run_at, levels.id
      FROM levels
    UNION ALL
    SELECT given.queue_name, given.priority, to_timestamp(given.run_at),
           LEAST(given.id, 9223372036854775806) + 1
      FROM unnest(%(reached_queues)s::text[], %(reached_priorities)s::integer[],
                  %(reached_times)s::float8[], %(reached_ids)s::bigint[])
           AS given (queue_name, priority, run_at, id)
), served AS MATERIALIZED (
    SELECT reached.queue_name, reached.priority, reached.run_at, reached.id
      FROM reached
     WHERE NOT EXISTS (SELECT FROM background_queues AS queue
                        WHERE queue.name = reached.queue_name
                          AND queue.paused_at IS NOT NULL)
     ORDER BY array_position(%(queues)s::text[], reached.queue_name::text),
              reached.priority DESC,
              reached.queue_name <= %(after)s,
              reached.queue_name
), due AS MATERIALIZED (
    SELECT ready.id
      FROM served
     CROSS JOIN LATERAL (
           SELECT job.id
             FROM background_jobs AS job
            WHERE job.status = 'queued'
              AND job.queue_name = served.queue_name
              AND job.priority = served.priority
              AND (job.run_at, job.id) >= (served.run_at, served.id)
              AND job.run_at <= statement_timestamp()
            ORDER BY job.run_at, job.id
            LIMIT %(limit)s
              FOR UPDATE SKIP LOCKED) AS ready
     LIMIT %(limit)s
), placed AS MATERIALIZED (
    SELECT due.id, row_number() OVER () AS place
      FROM due
), claimed AS (
    UPDATE background_jobs AS job
       SET status = 'processing',
           attempts = LEAST(job.attempts, 2147483646) + 1,
           locked_at = statement_timestamp(),
           locked_by = %(token)s,
           worker_id = %(worker_id)s,
           stop_requested_at = NULL,
           started_at = COALESCE(job.started_at, statement_timestamp()),
           attempted_at = statement_timestamp(),
           updated_at = statement_timestamp()
      FROM placed
     WHERE job.id = ANY (ARRAY(SELECT due.id FROM due))
       AND job.id = placed.id
    RETURNING placed.place, job.id, job.attempts, job.max_attempts, job.job_name,
              job.queue_name, job.payload::text, job.crashes, job.rerun_if_lost,
              job.metadata ->> 'interruptions' AS interruptions,
              EXTRACT(EPOCH FROM job.attempted_at)::float8 AS claimed_at,
              job.metadata ->> 'unknown_since' AS unknown_since,
              (job.metadata -> 'context')::text AS context,
              job.priority, EXTRACT(EPOCH FROM job.run_at)::float8 AS run_at
), soonest AS (
    SELECT (SELECT EXTRACT(EPOCH FROM min(later.run_at) - statement_timestamp())::float8
              FROM served
             CROSS JOIN LATERAL (
                   SELECT job.run_at
                     FROM background_jobs AS job
                    WHERE job.status = 'queued'
                      AND job.queue_name = served.queue_name
                      AND job.priority = served.priority
                      AND job.run_at > statement_timestamp()
                      AND job.run_at < statement_timestamp() + interval '1 day'
                    ORDER BY job.run_at
                    LIMIT 1) AS later) AS next_due,
           %(limit)s + 1 AS place
     WHERE (SELECT count(*) FROM claimed) < %(limit)s
)
SELECT id, attempts, max_attempts, job_name, queue_name, payload, crashes, rerun_if_lost,
       interruptions, claimed_at, unknown_since, context, priority, run_at, next_due,
       CASE WHEN place = 1
             AND %(reached_ids)s::bigint[] IS NULL
             AND clock_timestamp() - statement_timestamp() > interval '5 milliseconds'
            THEN (SELECT json_agg(json_build_array(reached.queue_name, reached.priority,
                                                   EXTRACT(EPOCH FROM LEAST(reached.run_at,
                                                                            statement_timestamp()))::float8,
                                                   reached.id))
                    FROM reached)
       END AS all_levels
  FROM claimed
  FULL JOIN soonest USING (place)
 ORDER BY place
"""

# queued → processing: this one job, by the thread that has enqueued it (immediate mode), or by a test. It has
# to be due, and its queue not paused, unless %(regardless)s. Returns the claim, if there is one.
CLAIM_THIS = """
WITH target AS MATERIALIZED (
    SELECT job.id
      FROM background_jobs AS job
     WHERE job.id = %(id)s
       AND job.status::text = 'queued'
       AND (%(regardless)s
            OR job.run_at <= statement_timestamp()
               AND NOT EXISTS (SELECT FROM background_queues AS queue
                                WHERE queue.name = job.queue_name
                                  AND queue.paused_at IS NOT NULL))
       FOR UPDATE SKIP LOCKED
)
UPDATE background_jobs AS job
   SET status = 'processing',
       attempts = LEAST(job.attempts, 2147483646) + 1,
       locked_at = statement_timestamp(),
       locked_by = %(token)s,
       worker_id = %(worker_id)s,
       stop_requested_at = NULL,
       started_at = COALESCE(job.started_at, statement_timestamp()),
       attempted_at = statement_timestamp(),
       updated_at = statement_timestamp()
 WHERE job.id = ANY (ARRAY(SELECT target.id FROM target))
RETURNING job.id, job.attempts, job.max_attempts, job.job_name, job.queue_name,
          job.payload::text, job.crashes, job.rerun_if_lost,
          job.metadata ->> 'interruptions' AS interruptions,
          EXTRACT(EPOCH FROM job.attempted_at)::float8 AS claimed_at,
          job.metadata ->> 'unknown_since' AS unknown_since,
          (job.metadata -> 'context')::text AS context
"""

# What one claim statement took: for a host that never received the answer to its COMMIT.
CLAIMED_BY = """
SELECT job.id, job.attempts
  FROM background_jobs AS job
 WHERE job.status = 'processing'
   AND job.locked_by = %(token)s
"""

# ── Holding ───────────────────────────────────────────────────────────────────────────────────────────────

# processing → processing, guarded. Writes no indexed column, so that it stays a HOT update. Returns the jobs
# whose claim still holds, and whether somebody has asked to stop them.
RENEW = """
WITH held AS MATERIALIZED (
    SELECT job.id
      FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(attempts)s::integer[])
           AS given (id, token, attempts)
     CROSS JOIN LATERAL (
           SELECT job.id
             FROM background_jobs AS job
            WHERE job.status = 'processing'
              AND job.id = given.id
              AND job.locked_by = given.token
              AND job.attempts = given.attempts
              FOR UPDATE SKIP LOCKED) AS job
)
UPDATE background_jobs AS job
   SET locked_at = statement_timestamp()
 WHERE job.id = ANY (ARRAY(SELECT held.id FROM held))
RETURNING job.id, job.stop_requested_at IS NOT NULL
"""

# processing → processing, guarded: merge what jobs say of themselves into their metadata. Writes no indexed
# column. Returns the ids that changed.
PROGRESS = """
WITH held AS MATERIALIZED (
    SELECT job.id, given.note
      FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(attempts)s::integer[], %(notes)s::text[])
           AS given (id, token, attempts, note)
     CROSS JOIN LATERAL (
           SELECT job.id
             FROM background_jobs AS job
            WHERE job.status = 'processing'
              AND job.id = given.id
              AND job.locked_by = given.token
              AND job.attempts = given.attempts
              FOR UPDATE SKIP LOCKED) AS job
)
UPDATE background_jobs AS job
   SET metadata = CASE WHEN jsonb_typeof(job.metadata) = 'object' THEN job.metadata
                       ELSE '{}' END || held.note::jsonb
  FROM held
 WHERE job.id = ANY (ARRAY(SELECT held.id FROM held))
   AND job.id = held.id
RETURNING job.id
"""

# What became of the given claims, without a lock: for those that RENEW or SETTLE did not return. Returns the
# ids of those that still hold, and of those that were completed, which only their holder can do.
HELD = """
SELECT job.id, job.status = 'completed'
  FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(attempts)s::integer[])
       AS given (id, token, attempts)
 CROSS JOIN LATERAL (
       SELECT job.id, job.status
         FROM background_jobs AS job
        WHERE job.status IN ('processing', 'completed')
          AND job.id = given.id
          AND job.locked_by = given.token
          AND job.attempts = given.attempts
       OFFSET 0) AS job
"""

# ── Settling ──────────────────────────────────────────────────────────────────────────────────────────────

# processing → completed, guarded. Returns the ids that changed.
COMPLETE = """
WITH held AS MATERIALIZED (
    SELECT job.id, given.result
      FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(attempts)s::integer[], %(results)s::text[])
           AS given (id, token, attempts, result)
     CROSS JOIN LATERAL (
           SELECT job.id
             FROM background_jobs AS job
            WHERE job.status = 'processing'
              AND job.id = given.id
              AND job.locked_by = given.token
              AND job.attempts = given.attempts
              FOR UPDATE SKIP LOCKED) AS job
)
UPDATE background_jobs AS job
   SET status = 'completed',
       result = held.result::jsonb,
       stop_requested_at = NULL,
       updated_at = statement_timestamp()
  FROM held
 WHERE job.id = ANY (ARRAY(SELECT held.id FROM held))
   AND job.id = held.id
RETURNING job.id
"""

# processing → gone, guarded: completion where nothing that is completed is kept. Returns the ids.
COMPLETE_AND_DELETE = """
WITH held AS MATERIALIZED (
    SELECT job.id
      FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(attempts)s::integer[])
           AS given (id, token, attempts)
     CROSS JOIN LATERAL (
           SELECT job.id
             FROM background_jobs AS job
            WHERE job.status = 'processing'
              AND job.id = given.id
              AND job.locked_by = given.token
              AND job.attempts = given.attempts
              FOR UPDATE SKIP LOCKED) AS job
)
DELETE FROM background_jobs AS job
 WHERE job.id = ANY (ARRAY(SELECT held.id FROM held))
RETURNING job.id
"""

# processing → completed, guarded: by the executor itself, as the last statement in the transaction of an
# atomic job. Waits for whoever has locked the row: a renewal, for a moment. Returns the id if it holds.
COMPLETE_OWN = """
UPDATE background_jobs AS job
   SET status = 'completed',
       result = %(result)s::jsonb,
       stop_requested_at = NULL,
       metadata = CASE WHEN jsonb_typeof(job.metadata) = 'object' THEN job.metadata
                       ELSE '{}' END || %(note)s::jsonb,
       updated_at = statement_timestamp()
 WHERE job.status = 'processing'
   AND job.id = %(id)s
   AND job.locked_by = %(token)s
   AND job.attempts = %(attempts)s
RETURNING job.id
"""

# processing → gone, guarded, in the same place.
COMPLETE_OWN_AND_DELETE = """
DELETE FROM background_jobs AS job
 WHERE job.status = 'processing'
   AND job.id = %(id)s
   AND job.locked_by = %(token)s
   AND job.attempts = %(attempts)s
RETURNING job.id
"""

# processing → whatever each verdict says, guarded: every verdict but a plain completion. `tokens` may be
# null, for claims by clients that use bare SQL. What would be queued again is cancelled where somebody has
# asked to stop it, perhaps since the verdict was made. Returns the ids that changed.
SETTLE = """
WITH held AS MATERIALIZED (
    SELECT given.*
      FROM unnest(%(ids)s::bigint[], %(tokens)s::uuid[], %(attempts)s::integer[],
                  %(statuses)s::job_status[], %(delays)s::float8[], %(refunds)s::integer[],
                  %(crashes)s::integer[], %(errors)s::text[], %(last_errors)s::text[],
                  %(fingerprints)s::text[], %(results)s::text[], %(notes)s::text[])
           AS given (id, token, attempts, status, delay, refund, crash, error, last_error, fingerprint,
                     result, note)
     CROSS JOIN LATERAL (
           SELECT
             FROM background_jobs AS job
            WHERE job.status = 'processing'
              AND job.id = given.id
              AND job.locked_by IS NOT DISTINCT FROM given.token
              AND job.attempts = given.attempts
              FOR UPDATE SKIP LOCKED) AS job
)
UPDATE background_jobs AS job
   SET status = CASE WHEN held.status = 'queued' AND job.stop_requested_at IS NOT NULL
                     THEN 'cancelled' ELSE held.status END,
       run_at = COALESCE(statement_timestamp() + held.delay * interval '1 second', job.run_at),
       attempts = job.attempts - held.refund,
       crashes = LEAST(job.crashes, 2147483646) + held.crash,
       locked_at = CASE WHEN held.status = 'queued' THEN NULL ELSE job.locked_at END,
       locked_by = CASE WHEN held.status = 'queued' THEN NULL ELSE job.locked_by END,
       stop_requested_at = NULL,
       last_error = COALESCE(held.last_error, job.last_error),
       error_fingerprint = COALESCE(held.fingerprint, job.error_fingerprint),
       errors = CASE WHEN held.error IS NULL THEN job.errors
                     ELSE jsonb_path_query_array(
                              job.errors || jsonb_build_array(
                                  jsonb_build_object('began', job.attempted_at, 'at', statement_timestamp(),
                                                     'attempt', job.attempts, 'worker', job.worker_id)
                                  || held.error::jsonb),
                              '$[last - 19 to last]') END,
       result = held.result::jsonb,
       metadata = CASE WHEN jsonb_typeof(job.metadata) = 'object' THEN job.metadata - 'unknown_since'
                       ELSE '{}' END || held.note::jsonb,
       updated_at = statement_timestamp()
  FROM held
 WHERE job.id = ANY (ARRAY(SELECT held.id FROM held))
   AND job.id = held.id
RETURNING job.id
"""

# ── Sweeping ──────────────────────────────────────────────────────────────────────────────────────────────

# False when another sweeper is at work.
SWEEP_LOCK = """
SELECT pg_try_advisory_xact_lock('background_jobs'::regclass::oid::integer, 1)
"""

# The longest lease that a live worker host goes by, or null; and for how long the server has been up.
LEASES = """
SELECT (SELECT max(worker.lease)
          FROM background_workers AS worker
         WHERE worker.last_seen_at > statement_timestamp() - worker.lease),
       statement_timestamp() - pg_postmaster_start_time()
"""

# Whether a job's holder has been silent for too long. Claims without a token are those of clients that use
# bare SQL and never renew. A claim from a time to come is lost as well: the clock has been set back, and a
# holder that is alive would have renewed by it.
_IS_LOST = """
       (job.locked_at BETWEEN statement_timestamp() - CASE WHEN job.locked_by IS NULL
                                                           THEN %(timeout)s::interval
                                                           ELSE %(lease)s::interval END
                          AND statement_timestamp() + %(lease)s::interval) IS NOT TRUE
""".strip()

# Such jobs, locked.
LOST = """
SELECT job.id, job.locked_by, job.attempts, job.max_attempts, job.job_name, job.queue_name, job.crashes,
       job.rerun_if_lost
  FROM background_jobs AS job
 WHERE job.status = 'processing'
   AND <is lost>
 ORDER BY job.id
 LIMIT %(limit)s
   FOR UPDATE SKIP LOCKED
""".replace("<is lost>", _IS_LOST)

# ── What people decide ────────────────────────────────────────────────────────────────────────────────────

# These look up ids. Here a status is compared as text, so that no index on a status seems to serve: without
# statistics, the planner would rather read every dead letter there is.

# queued → cancelled. Returns the ids that changed.
CANCEL = """
WITH target AS MATERIALIZED (
    SELECT job.id
      FROM background_jobs AS job
     WHERE job.id = ANY (%(ids)s::bigint[])
       AND job.status::text = 'queued'
     ORDER BY job.id
       FOR UPDATE SKIP LOCKED
)
UPDATE background_jobs AS job
   SET status = 'cancelled',
       updated_at = statement_timestamp()
 WHERE job.id = ANY (ARRAY(SELECT target.id FROM target))
RETURNING job.id
"""

# queued, due later → queued, due now. Returns the ids that changed.
BRING_FORWARD = """
WITH target AS MATERIALIZED (
    SELECT job.id
      FROM background_jobs AS job
     WHERE job.id = ANY (%(ids)s::bigint[])
       AND job.status::text = 'queued'
       AND job.run_at > statement_timestamp()
     ORDER BY job.id
       FOR UPDATE SKIP LOCKED
)
UPDATE background_jobs AS job
   SET run_at = statement_timestamp()
 WHERE job.id = ANY (ARRAY(SELECT target.id FROM target))
RETURNING job.id
"""

# processing → processing: ask the holder to stop the job, and wake it up. Returns the ids. Claims without a
# token are not asked: those who use bare SQL do not look. This one waits for locked rows. A holder locks its
# rows for a moment at each renewal, and somebody's wish must not depend on that; nor can it deadlock, since
# workers wait for no row. A job that is being claimed just now looks queued until its lock is to be had.
REQUEST_STOP = """
WITH target AS MATERIALIZED (
    SELECT job.id, job.status::text AS status, job.locked_by
      FROM background_jobs AS job
     WHERE job.id = ANY (%(ids)s::bigint[])
       AND job.status::text IN ('queued', 'processing')
     ORDER BY job.id
       FOR UPDATE
), asked AS (
    UPDATE background_jobs AS job
       SET stop_requested_at = COALESCE(job.stop_requested_at, statement_timestamp())
     WHERE job.id = ANY (ARRAY(SELECT target.id
                                 FROM target
                                WHERE target.status = 'processing'
                                  AND target.locked_by IS NOT NULL))
    RETURNING job.id
)
SELECT asked.id
  FROM asked
 CROSS JOIN (SELECT pg_notify('job_commands', '') WHERE EXISTS (SELECT FROM asked)) AS notified
"""

# failed, cancelled → queued, with fresh attempts, due after %(delay)s, each %(spread)s after the one before,
# and in another queue if one is named. Returns the ids that changed. Without those whose unique key is taken
# by a job that waits or runs; of several with one key, the lowest id is queued. Only a key that somebody
# takes at the same moment is an IntegrityError, which `store.retry` resolves.
RETRY = """
WITH target AS MATERIALIZED (
    SELECT job.id, job.job_name, job.unique_key
      FROM background_jobs AS job
     WHERE job.id = ANY (%(ids)s::bigint[])
       AND job.status::text IN ('failed', 'cancelled')
       AND (job.unique_key IS NULL
            OR NOT EXISTS (SELECT
                             FROM background_jobs AS live
                            WHERE live.job_name = job.job_name
                              AND live.unique_key = job.unique_key
                              AND live.status IN ('queued', 'processing')
                           OFFSET 0))
     ORDER BY job.id
       FOR UPDATE SKIP LOCKED
), chosen AS (
    SELECT min(target.id) AS id
      FROM target
     GROUP BY target.job_name, target.unique_key, CASE WHEN target.unique_key IS NULL THEN target.id END
), placed AS MATERIALIZED (
    SELECT chosen.id, row_number() OVER (ORDER BY chosen.id) - 1 AS place
      FROM chosen
)
UPDATE background_jobs AS job
   SET status = 'queued',
       queue_name = COALESCE(%(queue_name)s, job.queue_name),
       run_at = statement_timestamp() + %(delay)s::interval + placed.place * %(spread)s::interval,
       attempts = 0,
       crashes = 0,
       locked_at = NULL,
       locked_by = NULL,
       stop_requested_at = NULL,
       metadata = CASE WHEN jsonb_typeof(job.metadata) = 'object' THEN job.metadata - 'unknown_since'
                       ELSE job.metadata END,
       updated_at = statement_timestamp()
  FROM placed
 WHERE job.id = ANY (ARRAY(SELECT placed.id FROM placed))
   AND job.id = placed.id
RETURNING job.id
"""

# failed, cancelled → the same, with other arguments: for a RETRY in the same transaction. Returns the id.
EDIT = """
UPDATE background_jobs AS job
   SET payload = %(payload)s::jsonb,
       unique_key = %(unique_key)s
 WHERE job.id = %(id)s
   AND job.status::text IN ('failed', 'cancelled')
RETURNING job.id
"""

# → queued: a copy of a job, due now, which brings the context along and says what it is a copy of. Returns
# its id; no row where the job is gone, or one with its unique key waits or runs.
DUPLICATE = """
INSERT INTO background_jobs
       (queue_name, job_name, payload, priority, max_attempts, rerun_if_lost, unique_key, metadata)
SELECT job.queue_name, job.job_name, job.payload, job.priority, job.max_attempts, job.rerun_if_lost,
       job.unique_key,
       CASE WHEN jsonb_typeof(job.metadata -> 'context') = 'object'
            THEN jsonb_build_object('context', job.metadata -> 'context') ELSE '{}' END
       || jsonb_build_object('copy_of', job.id, 'enqueued_by', %(by)s::text)
  FROM background_jobs AS job
 WHERE job.id = %(id)s
    ON CONFLICT (job_name, unique_key)
       WHERE unique_key IS NOT NULL AND status IN ('queued', 'processing') DO NOTHING
RETURNING id
"""

# failed → cancelled. Returns the ids that changed.
DISCARD = """
WITH target AS MATERIALIZED (
    SELECT job.id
      FROM background_jobs AS job
     WHERE job.id = ANY (%(ids)s::bigint[])
       AND job.status::text = 'failed'
     ORDER BY job.id
       FOR UPDATE SKIP LOCKED
)
UPDATE background_jobs AS job
   SET status = 'cancelled',
       updated_at = statement_timestamp()
 WHERE job.id = ANY (ARRAY(SELECT target.id FROM target))
RETURNING job.id
"""

# The jobs with these ids as they are. And the same, locked until the transaction ends, without those that
# somebody else has locked.
SEEN = """
SELECT job.id, job.job_name, job.status::text, job.attempts, job.max_attempts, job.queue_name,
       job.locked_by, job.updated_at
  FROM background_jobs AS job
 WHERE job.id = ANY (%(ids)s::bigint[])
 ORDER BY job.id
"""
HOLD = f"{SEEN}   FOR UPDATE SKIP LOCKED"

# ── Acts on all jobs that a filter finds ──────────────────────────────────────────────────────────────────

# What is not given does not matter. An empty fingerprint is that of jobs which have none.
_MATCHES = """(%(queue)s::text IS NULL OR job.queue_name = %(queue)s)
       AND (%(job)s::text IS NULL OR job.job_name = %(job)s)
       AND (%(fingerprint)s::text IS NULL OR COALESCE(job.error_fingerprint, '') = %(fingerprint)s)
       AND (%(unique_key)s::text IS NULL OR job.unique_key = %(unique_key)s)
       AND (%(exception)s::text IS NULL OR starts_with(job.last_error, %(exception)s || ':'))
       AND (%(text)s::text IS NULL OR job.unique_key = %(text)s OR job.job_name = %(text)s
            OR strpos(lower(job.last_error), lower(%(text)s)) > 0)
       AND (%(attempts_from)s::integer IS NULL OR job.attempts >= %(attempts_from)s)
       AND (%(attempts_to)s::integer IS NULL OR job.attempts <= %(attempts_to)s)"""

# The next %(limit)s jobs of a status, in the order in which they have come to it, and whether each matches:
# so that neither a filter that finds little nor one that finds much makes the statement long. Without a lock.
_LOOK = """
SELECT job.id, (<matches>) IS TRUE AS matches,
       0, job.updated_at
  FROM background_jobs AS job
 WHERE <among>
   AND (job.updated_at, job.id) > (%(after)s::timestamptz, %(after_id)s)
   AND job.updated_at BETWEEN %(since)s AND %(until)s
 ORDER BY job.updated_at, job.id
 LIMIT %(limit)s
"""

# How many jobs match, among the latest %(limit)s of a status; and how many were looked at.
_COUNT = """
SELECT count(*) FILTER (WHERE latest.matches), count(*)
  FROM (SELECT (<matches>) IS TRUE AS matches
          FROM background_jobs AS job
         WHERE <among>
           AND job.updated_at BETWEEN %(since)s AND %(until)s
         ORDER BY job.updated_at DESC
         LIMIT %(limit)s) AS latest
"""


# Those that match, among the latest %(limit)s of a status, in groups of one job and one fingerprint, at most
# %(most)s of them, the largest first: how many, when the first and the last of them came, and the id and the
# error of one. In each row, too, how many groups there are, and how many jobs in all of them.
_GROUPS = """
SELECT grouped.job_name, grouped.fingerprint, grouped.jobs, grouped.first_at, grouped.last_at,
       grouped.example, left(job.last_error, 1000), grouped.groups, grouped.total
  FROM (SELECT latest.job_name, latest.fingerprint, count(*) AS jobs, min(latest.updated_at) AS first_at,
               max(latest.updated_at) AS last_at, max(latest.id) AS example,
               count(*) OVER () AS groups, (sum(count(*)) OVER ())::bigint AS total
          FROM (SELECT job.id, job.job_name, COALESCE(job.error_fingerprint, '') AS fingerprint,
                       job.updated_at, (<matches>) IS TRUE AS matches
                  FROM background_jobs AS job
                 WHERE <among>
                   AND job.updated_at BETWEEN %(since)s AND %(until)s
                 ORDER BY job.updated_at DESC
                 LIMIT %(limit)s) AS latest
         WHERE latest.matches
         GROUP BY latest.job_name, latest.fingerprint
         ORDER BY jobs DESC, last_at DESC
         LIMIT %(most)s) AS grouped
 CROSS JOIN LATERAL (SELECT job.last_error
                       FROM background_jobs AS job
                      WHERE job.id = grouped.example
                     OFFSET 0) AS job
 ORDER BY grouped.jobs DESC, grouped.last_at DESC
"""

# The same of jobs that wait in one queue, in the order in which they would be claimed. They come to a status
# by their `updated_at` as others do. What carries operations on is left alone.
_MATCHES_QUEUED = f"""{_MATCHES}
       AND job.updated_at BETWEEN %(since)s AND %(until)s
       AND job.job_name <> 'django_pgjobs.operations.carry_on'"""

_LOOK_QUEUED = """
SELECT next.id, next.matches, next.priority, next.run_at
  FROM ((SELECT job.id, (<matches>) IS TRUE AS matches, job.priority, job.run_at
           FROM background_jobs AS job
          WHERE job.status = 'queued'
            AND job.queue_name = %(queue)s
            AND job.priority = %(after_priority)s
            AND (job.run_at, job.id) > (%(after)s::timestamptz, %(after_id)s)
          ORDER BY job.run_at, job.id
          LIMIT %(limit)s)
        UNION ALL
        (SELECT job.id, (<matches>) IS TRUE, job.priority, job.run_at
           FROM background_jobs AS job
          WHERE job.status = 'queued'
            AND job.queue_name = %(queue)s
            AND job.priority < %(after_priority)s
          ORDER BY job.priority DESC, job.run_at, job.id
          LIMIT %(limit)s)) AS next
 ORDER BY next.priority DESC, next.run_at, next.id
 LIMIT %(limit)s
""".replace("<matches>", _MATCHES_QUEUED)

_COUNT_QUEUED = """
SELECT count(*) FILTER (WHERE first.matches), count(*)
  FROM (SELECT (<matches>) IS TRUE AS matches
          FROM background_jobs AS job
         WHERE job.status = 'queued'
           AND job.queue_name = %(queue)s
         ORDER BY job.priority DESC, job.run_at, job.id
         LIMIT %(limit)s) AS first
""".replace("<matches>", _MATCHES_QUEUED)

_OF_STATUS = "job.status = '<status>'"
_OF_IDS = "job.id = ANY (%(ids)s::bigint[]) AND job.status::text = '<status>'"


def _for_each(statement: str, among: str) -> dict[str, str]:
    text = statement.replace("<matches>", _MATCHES).replace("<among>", among)
    return {status: text.replace("<status>", status) for status in ("failed", "cancelled")}


LOOK, COUNT, GROUPS = (_for_each(statement, _OF_STATUS) for statement in (_LOOK, _COUNT, _GROUPS))
LOOK["queued"], COUNT["queued"] = _LOOK_QUEUED, _COUNT_QUEUED
LOOK_AMONG, COUNT_AMONG, GROUPS_AMONG = (
    _for_each(statement, _OF_IDS) for statement in (_LOOK, _COUNT, _GROUPS)
)

# When the dead letter came that has %(limit)s later ones, if there are so many.
EDGE = """
SELECT job.updated_at
  FROM background_jobs AS job
 WHERE job.status = 'failed'
 ORDER BY job.updated_at DESC
OFFSET %(limit)s
 LIMIT 1
"""

# The names of jobs, and of the classes of exceptions, among the latest %(limit)s dead letters.
DEAD_NAMES = r"""
SELECT array_agg(DISTINCT latest.job_name),
       array_agg(DISTINCT latest.exception) FILTER (WHERE latest.exception <> '')
  FROM (SELECT job.job_name, substring(job.last_error FROM '^(\w{1,100}):') AS exception
          FROM background_jobs AS job
         WHERE job.status = 'failed'
         ORDER BY job.updated_at DESC
         LIMIT %(limit)s) AS latest
"""

# ── Queues ────────────────────────────────────────────────────────────────────────────────────────────────

# Let workers claim nothing from a queue any more. Returns its name, unless it was paused before.
PAUSE = """
INSERT INTO background_queues AS queue (name, paused_at, paused_by, reason)
VALUES (%(name)s, statement_timestamp(), %(by)s, %(reason)s)
    ON CONFLICT (name) DO UPDATE
   SET paused_at = excluded.paused_at,
       paused_by = excluded.paused_by,
       reason = excluded.reason
 WHERE queue.paused_at IS NULL
RETURNING queue.name
"""

# Let workers claim from a queue again, and wake them up. Returns since when it was paused, by whom and why,
# if it was.
RESUME = """
WITH paused AS MATERIALIZED (
    SELECT queue.name, queue.paused_at, queue.paused_by, queue.reason
      FROM background_queues AS queue
     WHERE queue.name = %(name)s
       AND queue.paused_at IS NOT NULL
       FOR UPDATE
), resumed AS (
    UPDATE background_queues AS queue
       SET paused_at = NULL,
           paused_by = '',
           reason = ''
     WHERE queue.name = ANY (ARRAY(SELECT paused.name FROM paused))
    RETURNING queue.name
)
SELECT paused.paused_at, paused.paused_by, paused.reason
  FROM paused
 CROSS JOIN (SELECT pg_notify('job_created', %(name)s) WHERE EXISTS (SELECT FROM resumed)) AS notified
"""

# ── Pruning ───────────────────────────────────────────────────────────────────────────────────────────────

_PRUNE = """
WITH old AS MATERIALIZED (
    SELECT job.id
      FROM background_jobs AS job
     WHERE job.status = '<status>'
       AND job.updated_at < statement_timestamp() - %(age)s::interval
     ORDER BY job.updated_at
     LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED
)
DELETE FROM background_jobs AS job
 WHERE job.id = ANY (ARRAY(SELECT old.id FROM old))
"""

_PRUNABLE = """
SELECT count(*)
  FROM background_jobs AS job
 WHERE job.status = '<status>'
   AND job.updated_at < statement_timestamp() - %(age)s::interval
"""

# Finished → gone, the oldest first, at most %(limit)s rows; one statement for each status, which must be a
# literal. And how many such rows there are.
PRUNE = {status: _PRUNE.replace("<status>", status) for status in ("completed", "failed", "cancelled")}
PRUNABLE = {status: _PRUNABLE.replace("<status>", status) for status in PRUNE}

# The same of operations that are finished.
PRUNE_OPERATIONS = """
DELETE FROM background_operations AS operation
 WHERE operation.id = ANY (ARRAY(
       SELECT finished.id
         FROM background_operations AS finished
        WHERE finished.state = 'finished'
          AND finished.updated_at < statement_timestamp() - %(age)s::interval
        ORDER BY finished.id
        LIMIT %(limit)s))
"""

PRUNABLE_OPERATIONS = """
SELECT count(*)
  FROM background_operations AS operation
 WHERE operation.state = 'finished'
   AND operation.updated_at < statement_timestamp() - %(age)s::interval
"""

# ── Worker hosts ──────────────────────────────────────────────────────────────────────────────────────────

# Say that a host is alive. The first call makes its row; `started_at` stays. Returns whether somebody has
# asked it to stop, and who; no row, and nothing is done, where somebody has locked its row.
ANNOUNCE_WORKER = """
WITH held AS MATERIALIZED (
    SELECT worker.id
      FROM background_workers AS worker
     WHERE worker.id = %(id)s
       FOR UPDATE SKIP LOCKED
), made AS (
    INSERT INTO background_workers
           (id, hostname, pid, queues, processes, threads, async_slots, lease, version, state, running,
            executors)
    SELECT %(id)s, %(hostname)s, %(pid)s, %(queues)s::jsonb, %(processes)s, %(threads)s, %(async_slots)s,
           %(lease)s, %(version)s, %(state)s, %(running)s, %(executors)s::jsonb
     WHERE NOT EXISTS (SELECT FROM background_workers AS worker WHERE worker.id = %(id)s)
)
UPDATE background_workers AS worker
   SET state = %(state)s,
       running = %(running)s,
       executors = %(executors)s::jsonb,
       last_seen_at = statement_timestamp()
 WHERE worker.id = ANY (ARRAY(SELECT held.id FROM held))
RETURNING worker.stop_requested_at IS NOT NULL, worker.stop_requested_by
"""

# Ask a host to stop, and wake it up. Returns its id, unless it was asked before, is stopping already, or has
# locked its row for a moment.
ASK_WORKER_TO_STOP = """
WITH held AS MATERIALIZED (
    SELECT worker.id
      FROM background_workers AS worker
     WHERE worker.id = %(id)s
       AND worker.state = 'running'
       AND worker.stop_requested_at IS NULL
       FOR UPDATE SKIP LOCKED
), asked AS (
    UPDATE background_workers AS worker
       SET stop_requested_at = statement_timestamp(),
           stop_requested_by = %(by)s
     WHERE worker.id = ANY (ARRAY(SELECT held.id FROM held))
    RETURNING worker.id
)
SELECT asked.id
  FROM asked
 CROSS JOIN (SELECT pg_notify('job_commands', '') WHERE EXISTS (SELECT FROM asked)) AS notified
"""

FORGET_WORKER = """
DELETE FROM background_workers WHERE id = %(id)s
"""

# Hosts that ended without a word, a day later.
PRUNE_WORKERS = """
WITH old AS MATERIALIZED (
    SELECT worker.id
      FROM background_workers AS worker
     WHERE worker.last_seen_at < statement_timestamp() - interval '1 day'
       FOR UPDATE SKIP LOCKED
)
DELETE FROM background_workers AS worker
 WHERE worker.id = ANY (ARRAY(SELECT old.id FROM old))
"""

# End the sessions of an executor that has been killed: its last statement may still be running, or even
# committing. Only those that are ours to end, each within a second.
END_SESSIONS = """
SELECT count(*) FILTER (WHERE pg_terminate_backend(activity.pid, 1000))
  FROM pg_stat_activity AS activity
 WHERE activity.application_name = ANY (%(names)s::text[])
   AND activity.usename = current_user
"""

# ── Looking ───────────────────────────────────────────────────────────────────────────────────────────────

# Each queue and priority in which jobs wait, found by stepping through the claim index.
_LEVELS = """
levels (queue_name, priority) AS (
    (SELECT job.queue_name, job.priority
       FROM background_jobs AS job
      WHERE job.status = 'queued'
      ORDER BY job.queue_name, job.priority DESC
      LIMIT 1)
    UNION ALL
    SELECT next.queue_name, next.priority
      FROM levels
     CROSS JOIN LATERAL (
           (SELECT job.queue_name, job.priority
              FROM background_jobs AS job
             WHERE job.status = 'queued'
               AND job.queue_name = levels.queue_name
               AND job.priority < levels.priority
             ORDER BY job.priority DESC
             LIMIT 1)
           UNION ALL
           (SELECT job.queue_name, job.priority
              FROM background_jobs AS job
             WHERE job.status = 'queued'
               AND job.queue_name > levels.queue_name
             ORDER BY job.queue_name, job.priority DESC
             LIMIT 1)
           LIMIT 1) AS next
)
"""

# One row for each queue that has anything to say, or is paused. Neither backlog nor history costs more than a
# bounded number of rows. Of what waits, the first %(most)s are counted in each queue and priority, fewer
# where there are more than ten of these, and of these the first thousand; of what runs, %(most)s; of dead
# letters and of what completed within %(window)s, the newest %(most)s.
#
# Where more than that finished in the window, the period that is looked back at is shorter: as long as all
# that finished in it was counted. Pickup is how long what completed had been due when it was claimed.
QUEUE_STATS = """
WITH RECURSIVE <levels>, level AS MATERIALIZED (
    SELECT levels.queue_name, levels.priority FROM levels LIMIT 1000
), share (jobs) AS MATERIALIZED (
    SELECT CASE WHEN count(*) > 10 THEN LEAST(%(most)s, GREATEST(10 * %(most)s / count(*), 100))
                ELSE %(most)s END
      FROM level
), waiting AS (
    SELECT level.queue_name,
           sum(LEAST(due.jobs, share.jobs)) AS due, sum(LEAST(later.jobs, share.jobs)) AS later,
           min(due.oldest) AS oldest,
           bool_or(due.jobs > share.jobs) AS more_due, bool_or(later.jobs > share.jobs) AS more_later
      FROM level
     CROSS JOIN share
     CROSS JOIN LATERAL (
           SELECT count(*) AS jobs, min(counted.run_at) AS oldest
             FROM (SELECT job.run_at
                     FROM background_jobs AS job
                    WHERE job.status = 'queued'
                      AND job.queue_name = level.queue_name
                      AND job.priority = level.priority
                      AND job.run_at <= statement_timestamp()
                    ORDER BY job.run_at
                    LIMIT share.jobs + 1) AS counted) AS due
     CROSS JOIN LATERAL (
           SELECT count(*) AS jobs
             FROM (SELECT
                     FROM background_jobs AS job
                    WHERE job.status = 'queued'
                      AND job.queue_name = level.queue_name
                      AND job.priority = level.priority
                      AND job.run_at > statement_timestamp()
                    ORDER BY job.run_at
                    LIMIT share.jobs + 1) AS counted) AS later
     GROUP BY level.queue_name
), running AS (
    SELECT job.queue_name, count(*) AS jobs, sum(count(*)) OVER () > %(most)s AS more,
           bool_or(job.worker_id IS NULL) AS by_clients
      FROM (SELECT job.queue_name, job.worker_id
              FROM background_jobs AS job
             WHERE job.status = 'processing'
             LIMIT %(most)s + 1) AS job
     GROUP BY job.queue_name
), newest_dead AS MATERIALIZED (
    SELECT job.queue_name, job.updated_at
      FROM background_jobs AS job
     WHERE job.status = 'failed'
     ORDER BY job.updated_at DESC
     LIMIT %(most)s + 1
), newest_done AS MATERIALIZED (
    SELECT job.queue_name, job.updated_at, job.worker_id,
           GREATEST(EXTRACT(EPOCH FROM job.attempted_at - GREATEST(job.run_at, job.created_at)), 0)::float8
           AS pickup
      FROM background_jobs AS job
     WHERE job.status = 'completed'
       AND job.updated_at > statement_timestamp() - %(window)s::interval
     ORDER BY job.updated_at DESC
     LIMIT %(most)s + 1
), period (since) AS MATERIALIZED (
    SELECT GREATEST(statement_timestamp() - %(window)s::interval,
                    (SELECT min(updated_at) FROM newest_dead HAVING count(*) > %(most)s),
                    (SELECT min(updated_at) FROM newest_done HAVING count(*) > %(most)s))
), dead AS (
    SELECT newest_dead.queue_name, count(*) AS jobs, sum(count(*)) OVER () > %(most)s AS more,
           count(*) FILTER (WHERE newest_dead.updated_at > period.since) AS lately
      FROM newest_dead
     CROSS JOIN period
     GROUP BY newest_dead.queue_name
), done AS (
    SELECT newest_done.queue_name, count(*) AS lately,
           bool_or(newest_done.worker_id IS NULL) AS by_clients,
           percentile_cont(ARRAY[0.5, 0.95]) WITHIN GROUP (ORDER BY newest_done.pickup) AS pickup
      FROM newest_done
     CROSS JOIN period
     WHERE newest_done.updated_at > period.since
     GROUP BY newest_done.queue_name
), paused AS (
    SELECT queue.name AS queue_name, queue.paused_at, queue.paused_by, left(queue.reason, 300) AS reason
      FROM background_queues AS queue
     WHERE queue.paused_at IS NOT NULL
)
SELECT queue_name,
       COALESCE(waiting.due + waiting.later, 0)::bigint,
       COALESCE(waiting.due, 0)::bigint,
       EXTRACT(EPOCH FROM statement_timestamp() - waiting.oldest)::float8,
       COALESCE(running.jobs, 0),
       COALESCE(dead.jobs, 0),
       COALESCE(done.lately, 0),
       COALESCE(dead.lately, 0),
       done.pickup[1], done.pickup[2],
       running.by_clients IS TRUE OR done.by_clients IS TRUE,
       paused.paused_at IS NOT NULL,
       EXTRACT(EPOCH FROM statement_timestamp() - paused.paused_at)::float8,
       COALESCE(paused.paused_by, ''), COALESCE(paused.reason, ''),
       array_remove(ARRAY[CASE WHEN waiting.more_due OR waiting.more_later THEN 'queued' END,
                          CASE WHEN waiting.more_due THEN 'due' END,
                          CASE WHEN running.more THEN 'processing' END,
                          CASE WHEN dead.more THEN 'failed' END], NULL),
       EXTRACT(EPOCH FROM statement_timestamp() - period.since)::float8
  FROM waiting
  FULL JOIN running USING (queue_name)
  FULL JOIN dead USING (queue_name)
  FULL JOIN done USING (queue_name)
  FULL JOIN paused USING (queue_name)
 CROSS JOIN period
 ORDER BY queue_name
""".replace("<levels>", _LEVELS.strip())

# How many ids have been drawn for jobs; null where our role may not know.
ENQUEUED = """
SELECT CASE WHEN has_sequence_privilege(ids.oid, 'SELECT') THEN
            COALESCE(pg_sequence_last_value(ids.oid), 0) END
  FROM (SELECT pg_get_serial_sequence('background_jobs', 'id')::regclass) AS ids (oid)
"""

# All hosts that have not been forgotten, and whether they were heard of within their lease.
WORKERS = """
SELECT worker.id, worker.hostname, worker.pid, worker.queues, worker.state, worker.running,
       worker.processes * (worker.threads + worker.async_slots) AS slots,
       EXTRACT(EPOCH FROM statement_timestamp() - worker.started_at)::float8 AS up_for,
       EXTRACT(EPOCH FROM statement_timestamp() - worker.last_seen_at)::float8 AS silent_for,
       worker.last_seen_at > statement_timestamp() - worker.lease AS is_alive
  FROM background_workers AS worker
 ORDER BY worker.hostname, worker.pid
"""

# Of what each host runs, the %(each)s jobs that have run for longest, out of %(most)s jobs; and, in each row,
# how many of these the host runs.
RUNNING = """
SELECT held.worker_id, held.of_worker, held.id, held.job_name, held.queue_name, held.attempts,
       held.max_attempts, EXTRACT(EPOCH FROM statement_timestamp() - held.attempted_at)::float8
  FROM (SELECT job.*,
               count(*) OVER (PARTITION BY job.worker_id) AS of_worker,
               row_number() OVER (PARTITION BY job.worker_id ORDER BY job.attempted_at, job.id) AS place
          FROM (SELECT job.worker_id, job.id, job.job_name, job.queue_name, job.attempts, job.max_attempts,
                       job.attempted_at
                  FROM background_jobs AS job
                 WHERE job.status = 'processing'
                 LIMIT %(most)s) AS job) AS held
 WHERE held.place <= %(each)s
 ORDER BY held.worker_id, held.place
"""

# How many jobs LOST would find, counted to %(most)s, without a lock.
UNSWEPT = """
SELECT count(*)
  FROM (SELECT
          FROM background_jobs AS job
         WHERE job.status = 'processing'
           AND <is lost>
         LIMIT %(most)s) AS job
""".replace("<is lost>", _IS_LOST)

# How many jobs completed and how many became dead letters, each counted to %(most)s, in each of the last
# %(spans)s spans of time of this %(width)s. Spans begin at multiples of the width; the last one goes on.
HISTORY = """
SELECT span.start, completed.jobs, failed.jobs
  FROM generate_series(date_bin(%(width)s::interval, statement_timestamp(), 'epoch')
                       - (%(spans)s - 1) * %(width)s::interval,
                       statement_timestamp(), %(width)s::interval) AS span (start)
 CROSS JOIN LATERAL (
       SELECT count(*) AS jobs
         FROM (SELECT
                 FROM background_jobs AS job
                WHERE job.status = 'completed'
                  AND job.updated_at >= span.start
                  AND job.updated_at < span.start + %(width)s::interval
                LIMIT %(most)s) AS counted) AS completed
 CROSS JOIN LATERAL (
       SELECT count(*) AS jobs
         FROM (SELECT
                 FROM background_jobs AS job
                WHERE job.status = 'failed'
                  AND job.updated_at >= span.start
                  AND job.updated_at < span.start + %(width)s::interval
                LIMIT %(most)s) AS counted) AS failed
 ORDER BY span.start
"""

# How long ago the oldest job of each finished status finished, or null.
_OLDEST = """
SELECT EXTRACT(EPOCH FROM statement_timestamp() - min(job.updated_at))::float8
  FROM background_jobs AS job
 WHERE job.status = '<status>'
"""
OLDEST = {status: _OLDEST.replace("<status>", status) for status in PRUNE}

# Schedules whose tick has been due for longer than %(age)s, and for how long, in seconds.
LATE_SCHEDULES = """
SELECT schedule.name, schedule.declared,
       EXTRACT(EPOCH FROM statement_timestamp() - schedule.next_tick_at)::float8
  FROM background_schedules AS schedule
 WHERE schedule.enabled
   AND schedule.next_tick_at < statement_timestamp() - %(age)s::interval
 ORDER BY schedule.next_tick_at
 LIMIT %(most)s
"""

# The database's clock.
NOW = """
SELECT statement_timestamp()
"""

# For pages that people look at: the longest that one of their statements may take, in milliseconds.
PATIENCE = """
SELECT set_config('statement_timeout', %(milliseconds)s::text, true)
"""

# For what people ask for: the longest that a statement may wait for a lock, in milliseconds.
LOCK_PATIENCE = """
SELECT set_config('lock_timeout', %(milliseconds)s::text, true)
"""

# How many jobs there are, as far as the planner knows; below zero when it has never looked.
ESTIMATE = """
SELECT reltuples::bigint FROM pg_class WHERE oid = to_regclass('background_jobs')
"""

# Names of queues, at most %(limit)s: all in which jobs wait (found by stepping through the claim index),
# those of the latest thousand jobs and dead letters, and those on which people have decided something.
QUEUE_NAMES = """
WITH RECURSIVE waiting (queue_name) AS (
    (SELECT job.queue_name
       FROM background_jobs AS job
      WHERE job.status = 'queued'
      ORDER BY job.queue_name
      LIMIT 1)
    UNION ALL
    SELECT next.queue_name
      FROM waiting
     CROSS JOIN LATERAL (
           SELECT job.queue_name
             FROM background_jobs AS job
            WHERE job.status = 'queued'
              AND job.queue_name > waiting.queue_name
            ORDER BY job.queue_name
            LIMIT 1) AS next
)
(SELECT waiting.queue_name FROM waiting LIMIT %(limit)s)
 UNION
(SELECT latest.queue_name
   FROM (SELECT job.queue_name FROM background_jobs AS job ORDER BY job.id DESC LIMIT 1000) AS latest)
 UNION
(SELECT latest.queue_name
   FROM (SELECT job.queue_name FROM background_jobs AS job WHERE job.status = 'failed'
          ORDER BY job.updated_at DESC LIMIT 1000) AS latest)
 UNION
(SELECT queue.name FROM background_queues AS queue LIMIT %(limit)s)
 ORDER BY 1
 LIMIT %(limit)s
"""

# The texts of one job, each with its size in bytes, cut to %(most)s characters (%(most_errors)s for the
# history of errors), and whether it was cut. JSON of more than %(pretty)s bytes is not laid out.
TEXTS = """
SELECT part.name, written.size,
       left(shown.text, CASE part.name WHEN 'errors' THEN %(most_errors)s ELSE %(most)s END),
       length(shown.text) > CASE part.name WHEN 'errors' THEN %(most_errors)s ELSE %(most)s END
  FROM background_jobs AS job
 CROSS JOIN LATERAL (VALUES ('payload', job.payload, NULL), ('result', job.result, NULL),
                            ('metadata', job.metadata, NULL), ('errors', NULL, job.errors::text),
                            ('last_error', NULL, job.last_error)) AS part (name, value, text)
 CROSS JOIN LATERAL (SELECT octet_length(COALESCE(part.text, part.value::text)) OFFSET 0) AS written (size)
 CROSS JOIN LATERAL (SELECT CASE WHEN part.value IS NULL THEN part.text
                                 WHEN written.size > %(pretty)s THEN part.value::text
                                 ELSE jsonb_pretty(part.value) END OFFSET 0) AS shown (text)
 WHERE job.id = %(id)s
   AND shown.text IS NOT NULL
"""

# The latest %(most)s jobs with a job's unique key, whatever became of them, without the job itself.
WITH_KEY = """
SELECT job.id, job.status::text, job.created_at
  FROM background_jobs AS job
 WHERE job.job_name = %(job_name)s
   AND job.unique_key IS NOT NULL
   AND job.unique_key = %(unique_key)s
   AND job.id <> %(id)s
 ORDER BY job.created_at DESC
 LIMIT %(most)s
"""

# The %(most)s jobs of a schedule that came before one of them, and as many that came after, among the ids
# from %(first)s to %(last)s.
OF_SCHEDULE = """
SELECT near.id, near.status, near.created_at
  FROM ((SELECT job.id, job.status::text, job.created_at
           FROM background_jobs AS job
          WHERE job.id > %(id)s
            AND job.id <= %(last)s
            AND job.job_name = %(job_name)s
            AND job.metadata ->> 'schedule' = %(schedule)s
          ORDER BY job.id
          LIMIT %(most)s)
        UNION ALL
        (SELECT job.id, job.status::text, job.created_at
           FROM background_jobs AS job
          WHERE job.id < %(id)s
            AND job.id >= %(first)s
            AND job.job_name = %(job_name)s
            AND job.metadata ->> 'schedule' = %(schedule)s
          ORDER BY job.id DESC
          LIMIT %(most)s)) AS near
 ORDER BY near.id DESC
"""

# What the catalog says about our table: whether it is there, the values of its status, the triggers that
# fire, the indexes that can be used, and its storage settings.
CATALOG = """
SELECT jobs.oid IS NOT NULL,
       ARRAY(SELECT value.enumlabel::text
               FROM pg_attribute AS status
               JOIN pg_enum AS value ON value.enumtypid = status.atttypid
              WHERE status.attrelid = jobs.oid AND status.attname = 'status'
              ORDER BY value.enumsortorder),
       ARRAY(SELECT trigger.tgname::text
               FROM pg_trigger AS trigger
              WHERE trigger.tgrelid = jobs.oid AND trigger.tgenabled IN ('O', 'A')),
       ARRAY(SELECT index.relname::text
               FROM pg_index
               JOIN pg_class AS index ON index.oid = pg_index.indexrelid
              WHERE pg_index.indrelid = jobs.oid AND pg_index.indisvalid AND pg_index.indisready),
       (SELECT COALESCE(reloptions, '{}') FROM pg_class WHERE oid = jobs.oid)
  FROM (SELECT to_regclass('background_jobs')::oid) AS jobs (oid)
"""

# How many sessions may be open besides those kept for superusers: the server's limit, and those of our role
# and database where they have one, which do not bind superusers. Then how many are open, how many worker
# hosts are alive, and the sessions that these may open, with one for all the async jobs of a process.
CONNECTIONS = """
SELECT current_setting('max_connections')::integer
       - current_setting('superuser_reserved_connections')::integer
       - COALESCE(current_setting('reserved_connections', true), '0')::integer,
       (SELECT NULLIF(role.rolconnlimit, -1)
          FROM pg_roles AS role
         WHERE role.rolname = session_user AND NOT role.rolsuper),
       (SELECT NULLIF(database.datconnlimit, -1)
          FROM pg_database AS database
          JOIN pg_roles AS role ON role.rolname = session_user AND NOT role.rolsuper
         WHERE database.datname = current_database()),
       (SELECT sum(database.numbackends)::integer FROM pg_stat_database AS database),
       count(*),
       COALESCE(sum(2 + worker.processes::numeric
                        * (worker.threads::numeric + LEAST(worker.async_slots, 1))), 0)
  FROM background_workers AS worker
 WHERE worker.last_seen_at > statement_timestamp() - worker.lease
"""

# What vacuum has done for our table: how many rows live, and are dead; how long ago it was last there, or
# null; and whether it comes by itself.
VACUUM = """
SELECT stat.n_live_tup, stat.n_dead_tup,
       EXTRACT(EPOCH FROM statement_timestamp() - GREATEST(stat.last_vacuum, stat.last_autovacuum))::float8,
       current_setting('autovacuum')::boolean AND current_setting('track_counts')::boolean
       AND NOT EXISTS (SELECT FROM pg_options_to_table(jobs.reloptions) AS option
                        WHERE option.option_name = 'autovacuum_enabled'
                          AND NOT option.option_value::boolean)
  FROM pg_class AS jobs
  JOIN pg_stat_user_tables AS stat ON stat.relid = jobs.oid
 WHERE jobs.oid = 'background_jobs'::regclass
"""

# Whoever keeps vacuum from removing what became dead the longest ago: what it is, its name, and what is known
# of it; for how many seconds, where that may be seen, and for how many transactions. Vacuum itself is none.
OLDEST_SNAPSHOT = """
SELECT holder.*
  FROM (SELECT 'session', activity.pid::text,
               concat_ws(', ', activity.usename, NULLIF(activity.application_name, ''), activity.state),
               EXTRACT(EPOCH FROM statement_timestamp() - activity.xact_start)::float8,
               age(COALESCE(activity.backend_xmin, activity.backend_xid)) AS age
          FROM pg_stat_activity AS activity
         WHERE activity.pid <> pg_backend_pid()
           AND COALESCE(activity.datname, current_database()) = current_database()
           AND activity.backend_type IS DISTINCT FROM 'autovacuum worker'
           AND NOT EXISTS (SELECT FROM pg_stat_progress_vacuum AS vacuum WHERE vacuum.pid = activity.pid)
         UNION ALL
        SELECT 'prepared transaction', prepared.gid, prepared.owner,
               EXTRACT(EPOCH FROM statement_timestamp() - prepared.prepared)::float8,
               age(prepared.transaction)
          FROM pg_prepared_xacts AS prepared
         WHERE prepared.database = current_database()
         UNION ALL
        SELECT 'replication slot', slot.slot_name, slot.plugin, NULL, age(slot.xmin)
          FROM pg_replication_slots AS slot) AS holder
 WHERE holder.age IS NOT NULL
 ORDER BY holder.age DESC
 LIMIT 1
"""

# Our table and its indexes: their size in bytes, and roughly how much of it is needed for what is in them. A
# row needs its columns and a header, an entry of an index at most some 120 bytes.
SIZES = """
SELECT part.relname::text, part.relkind = 'r', pg_relation_size(part.oid),
       (part.reltuples * CASE part.relkind WHEN 'r' THEN (row.width + 28) / 0.85 ELSE 120 END)::bigint
  FROM pg_class AS jobs
  JOIN pg_namespace AS place ON place.oid = jobs.relnamespace
 CROSS JOIN LATERAL (
       SELECT sum(stats.avg_width) AS width
         FROM pg_stats AS stats
        WHERE stats.schemaname = place.nspname
          AND stats.tablename = jobs.relname) AS row
  JOIN pg_class AS part ON part.oid = jobs.oid
                        OR part.oid IN (SELECT indexrelid FROM pg_index WHERE indrelid = jobs.oid)
 WHERE jobs.oid = 'background_jobs'::regclass
   AND part.reltuples >= 0
   AND row.width > 0
 ORDER BY part.relkind DESC, part.relname
"""

# What a claim of one job costs. It is executed, so the transaction has to be rolled back.
EXPLAIN_CLAIM = f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {CLAIM}"

# Tells a database from any other: on this server, and since this server was started.
PLACE = """
SELECT current_database()::text, EXTRACT(EPOCH FROM pg_postmaster_start_time())::float8
"""

# The calls of jobs, in groups of one name and one form: whether the payload is a call at all, the number of
# positional arguments and the names of the others; how many jobs of it were looked at, and the latest one.
# Last, in each row, whether there may be more jobs than were looked at.
_CALLS = """
WITH RECURSIVE <looked_at>
SELECT job.job_name, COALESCE(part.alone AND part.args IS NOT NULL AND part.kwargs IS NOT NULL, false),
       COALESCE(jsonb_array_length(part.args), 0),
       ARRAY(SELECT jsonb_object_keys(part.kwargs) AS keyword ORDER BY keyword LIMIT 300) AS keywords,
       count(*), max(job.id),
       (SELECT beyond.places OR (SELECT max(taken.jobs) >= 2 * %(limit)s
                                   FROM (SELECT count(*) AS jobs FROM looked_at GROUP BY looked_at.place)
                                        AS taken)
          FROM beyond)
  FROM background_jobs AS job
 CROSS JOIN LATERAL (SELECT CASE WHEN jsonb_typeof(job.payload) = 'object' THEN job.payload
                                 ELSE '{"": 0}' END) AS call (payload)
 CROSS JOIN LATERAL (
       SELECT CASE WHEN NOT call.payload ? 'args' THEN '[]'
                   WHEN jsonb_typeof(call.payload -> 'args') = 'array' THEN call.payload -> 'args' END,
              CASE WHEN NOT call.payload ? 'kwargs' THEN '{}'
                   WHEN jsonb_typeof(call.payload -> 'kwargs') = 'object' THEN call.payload -> 'kwargs' END,
              call.payload - 'args' - 'kwargs' = '{}') AS part (args, kwargs, alone)
 WHERE job.id = ANY (ARRAY(SELECT looked_at.id FROM looked_at))
 GROUP BY 1, 2, 3, 4
 ORDER BY 1, 6 DESC
"""

# Of the jobs that wait, in each queue and priority the first and the last %(limit)s, in the first thousand of
# these; and those that run.
_LIVE = """
<levels>, beyond (places) AS (
    SELECT count(*) > 1000 FROM (SELECT FROM levels LIMIT 1001) AS level
), looked_at AS MATERIALIZED (
    SELECT waiting.id, concat(level.priority, ' ', level.queue_name) AS place
      FROM (SELECT levels.queue_name, levels.priority FROM levels LIMIT 1000) AS level
     CROSS JOIN LATERAL (
           (SELECT job.id
              FROM background_jobs AS job
             WHERE job.status = 'queued'
               AND job.queue_name = level.queue_name
               AND job.priority = level.priority
             ORDER BY job.run_at, job.id
             LIMIT %(limit)s)
           UNION
           (SELECT job.id
              FROM background_jobs AS job
             WHERE job.status = 'queued'
               AND job.queue_name = level.queue_name
               AND job.priority = level.priority
             ORDER BY job.run_at DESC, job.id DESC
             LIMIT %(limit)s)) AS waiting
    UNION ALL
    (SELECT job.id, '' FROM background_jobs AS job WHERE job.status = 'processing' LIMIT 2 * %(limit)s)
)
"""

# The latest dead letters.
_DEAD = """
beyond (places) AS (
    SELECT false
), looked_at AS MATERIALIZED (
    SELECT job.id, '' AS place
      FROM background_jobs AS job
     WHERE job.status = 'failed'
     ORDER BY job.updated_at DESC
     LIMIT 2 * %(limit)s
)
"""

LIVE_CALLS = _CALLS.replace("<looked_at>", _LIVE.strip()).replace("<levels>", _LEVELS.strip())
DEAD_CALLS = _CALLS.replace("<looked_at>", _DEAD.strip())

# ── In tests ──────────────────────────────────────────────────────────────────────────────────────────────

# queued → queued: time passes, so that all that waits comes nearer. It passes until the next job is due, of
# the queue %(queue)s or of any; at most for %(most)s seconds, which is for how long when none comes due. Jobs
# that come due within a second of each other do so at once, by being put back one more: their priorities
# matter then, and not in which millisecond each was enqueued. Durations are in seconds, since a day of an
# interval may have 23 hours. Returns how much time has passed.
PASS_TIME = """
WITH next AS MATERIALIZED (
    SELECT GREATEST(EXTRACT(EPOCH FROM job.run_at - statement_timestamp())::float8, 0) AS seconds
      FROM background_jobs AS job
     WHERE job.status = 'queued'
       AND (%(queue)s::text IS NULL OR job.queue_name = %(queue)s)
       AND NOT EXISTS (SELECT FROM background_queues AS queue
                        WHERE queue.name = job.queue_name
                          AND queue.paused_at IS NOT NULL)
     ORDER BY job.run_at
     LIMIT 1
       FOR UPDATE SKIP LOCKED
), passed AS MATERIALIZED (
    SELECT LEAST((SELECT next.seconds FROM next), %(most)s::float8) AS seconds
), waiting AS MATERIALIZED (
    SELECT job.id, job.run_at <= statement_timestamp() + comes_due.seconds * interval '1 second' AS comes_due
      FROM (SELECT LEAST(passed.seconds + 1, %(most)s::float8) AS seconds FROM passed) AS comes_due
     CROSS JOIN background_jobs AS job
     WHERE job.status = 'queued'
       AND job.run_at > statement_timestamp()
     ORDER BY job.id
       FOR UPDATE OF job SKIP LOCKED
), nearer AS (
    UPDATE background_jobs AS job
       SET run_at = job.run_at - (passed.seconds + waiting.comes_due::integer) * interval '1 second'
      FROM passed, waiting
     WHERE job.id = ANY (ARRAY(SELECT waiting.id FROM waiting))
       AND job.id = waiting.id
    RETURNING job.id
)
SELECT passed.seconds
  FROM passed
"""

# ── Notifications ─────────────────────────────────────────────────────────────────────────────────────────

# A host's message to itself, by which its listener knows that it still hears.
PROBE = """
SELECT pg_notify(%(channel)s, '')
"""
