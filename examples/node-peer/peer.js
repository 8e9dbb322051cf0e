/**
 * A generator in a run: it pulls, checks and confirms the groups of others, and publishes its own.
 *     node peer.js BOOTSTRAP_ADDRESS RUN MODEL_FOLDER [LIE]
 * It prints one JSON object a line. With a LIE (a name in `LIES`) its groups break that rule. Ctrl-C ends it.
 */
import { gossipsub } from '@chainsafe/libp2p-gossipsub'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { identify } from '@libp2p/identify'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { problemAt, score } from './arithmetic.js'
import { readManifest, readMembers } from './directory.js'
import { newIdentity } from './identity.js'
import * as rollout from './rollout.js'
import { request, serve } from './streams.js'
import { ModelTokenizer } from './tokenizer.js'

Promise.withResolvers ??= function () { // libp2p calls it; Node 20 lacks it
  const made = {}
  return Object.assign(made, { promise: new this((resolve, reject) => Object.assign(made, { resolve, reject })) })
}

const PUBLISH_EVERY_MS = 3000
const LIES = {
  reward_mismatch: (body) => ({ ...body, rewards: body.rewards.map((reward) => 1 - reward) }),
  prompt_mismatch: (body) => ({ ...body, problemHash: Buffer.alloc(16) }),
  logprobs: (body) => ({ ...body, logprobs: rollout.float32Bytes(Array(body.logprobs.length / 4).fill(0.5)) }),
  sampling: (body) => ({ ...body, sampling: { ...body.sampling, temperature: 0.25 } }),
  malformed: (body) => ({ ...body, texts: ['10'] })
}

/** Return the ids in a request of `fetch` or `confirm`, as hex. */
const idsIn = (payload) => payload.toString('hex').match(/.{64}/g) ?? []
const report = (event, fields) => console.log(JSON.stringify({ event, ...fields }))
const reportRefused = (peer, error) => report('refused', { peer: String(peer), reason: error.reason ?? error.message })

class Peer {
  constructor ({ node, identity, run, manifest, tokenizer, lie }) {
    Object.assign(this, { node, identity, run, manifest, tokenizer, lie, number: Math.floor(Date.now() / 1000) * 2 ** 20 })
    this.own = new Map()
    const bucket = rollout.sha256(identity.text).readUInt32BE() % 64
    this.topic = this.topicOf(bucket % manifest.wire.announcement_shards)
  }

  topicOf = (shard) => `/ftis/1/${this.run}/${shard}`
  protocolOf = (service) => `/ftis/1/${this.run}/${service}`

  /** Serve the streams and follow the announcements of all shards. */
  async start () {
    const answers = {
      hello: () => [Buffer.alloc(0)],
      ask: () => [...this.own.values()].map(({ announcement }) => announcement),
      fetch: (ids) => idsIn(ids).flatMap((id) => this.own.get(id)?.envelope ?? []),
      confirm: (ids, by) => idsIn(ids).map((id) => report('confirmed', { group: id, by })) && [Buffer.alloc(0)]
    }
    for (const [service, answer] of Object.entries(answers)) {
      await this.node.handle(this.protocolOf(service), ({ stream, connection }) =>
        serve(stream, (payload) => answer(payload, String(connection.remotePeer))).catch(() => stream.abort(new Error('cut'))))
    }
    const { pubsub } = this.node.services
    let last = Promise.resolve() // one pull at a time
    pubsub.addEventListener('message', ({ detail: { from, data } }) => {
      last = last.then(() => this.pullAll(from, data)).catch((error) => reportRefused(from, error))
    })
    for (let shard = 0; shard < this.manifest.wire.announcement_shards; shard++) pubsub.subscribe(this.topicOf(shard))
  }

  /** Pull all groups of an announcement. */
  async pullAll (from, data) {
    const { id, moreIds } = rollout.readAnnouncement(data)
    for (const one of [id, ...moreIds]) await this.pull(from, one).catch((error) => reportRefused(from, error))
  }

  /** Fetch a group from its announcer, check it, and confirm it. */
  async pull (from, id) {
    for (const envelope of await request(this.node, from, this.protocolOf('fetch'), id)) {
      const group = rollout.openEnvelope(envelope, Buffer.from(this.run, 'hex'))
      if (!group.id.equals(id)) throw new rollout.Rejected('unsolicited', 'another group')
      const texts = this.check(group)
      await request(this.node, from, this.protocolOf('confirm'), id)
      report('pulled', { group: group.id.toString('hex'), sender: group.sender, codec: group.fields.codec, texts })
    }
  }

  /** Return the texts of a group. Throws Rejected if its problem or a reward is another here. */
  check ({ fields, completions }) {
    const problem = problemAt(fields.promptIndex)
    if (!this.tokenizer.fingerprint.equals(fields.tokenizer)) throw new rollout.Rejected('tokenizer', 'another')
    if (!rollout.problemHash(problem.text).equals(fields.problemHash)) throw new rollout.Rejected('prompt_mismatch', problem.text)
    const texts = completions.map(({ tokenIds }, index) => this.tokenizer.answerText(tokenIds, fields.finishes[index]))
    const isRight = texts.every((text, index) => (text === null ? 0 : score(problem, text)) === completions[index].reward)
    if (!isRight) throw new rollout.Rejected('reward_mismatch', problem.text)
    return texts
  }

  /** Make, sign and announce one group: half of its completions are right. */
  async publish () {
    const body = this.makeBody(++this.number)
    const { id, envelope } = await rollout.sealBody(this.lie ? LIES[this.lie](body) : body, this.identity)
    const { number, createdMs, tokenizer } = body
    const claims = { numTokens: body.tokenIds.length / 4, envelopeBytes: envelope.length, tokenizer: tokenizer.subarray(0, 8) }
    const announcement = rollout.writeAnnouncement({ id, number, createdMs, ...claims })
    this.own.set(id.toString('hex'), { announcement, envelope })
    await this.node.services.pubsub.publish(this.topic, announcement)
    report('published', { group: id.toString('hex') })
  }

  makeBody (number) {
    const { group_size: groupSize, temperature, top_p: topP, top_k: topK } = this.manifest.sampling
    const promptIndex = Math.floor(Math.random() * 2 ** 31)
    const problem = problemAt(promptIndex)
    const texts = Array.from({ length: groupSize }, (_, index) => (index % 2 ? '0' : problem.answer))
    const ids = texts.map((text) => [...this.tokenizer.encode(text), this.tokenizer.endId])
    return {
      codec: rollout.CODEC.exact, run: Buffer.from(this.run, 'hex'), sender: this.identity.peer, number, createdMs: Date.now(),
      task: 'arithmetic', promptIndex, problemHash: rollout.problemHash(problem.text), model: 'node-peer',
      promptHash: rollout.promptHash(this.tokenizer.encodePrompt(problem.text)), endIds: [this.tokenizer.endId],
      tokenizer: this.tokenizer.fingerprint, sampling: { temperature, topP, topK },
      lengths: ids.map((one) => one.length), finishes: ids.map(() => rollout.FINISH_STOP),
      rewards: texts.map((text) => score(problem, text)), tokenIds: rollout.int32Bytes(ids.flat()),
      logprobs: rollout.float32Bytes(ids.flat().map((_, index) => -0.7 - index / 100))
    }
  }
}

const [address, run, model, lie] = process.argv.slice(2)
const identity = await newIdentity()
const node = await createLibp2p({
  privateKey: identity.privateKey,
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()], connectionEncrypters: [noise()], streamMuxers: [yamux()],
  services: { identify: identify(), pubsub: gossipsub({ allowPublishToZeroTopicPeers: true }) }
})
const { remotePeer } = await node.dial(multiaddr(address))
const manifest = await readManifest(node, remotePeer, run)
const peer = new Peer({ node, identity, run, manifest, tokenizer: new ModelTokenizer(model), lie })
await peer.start()
const members = await readMembers(node, remotePeer, run)
for (const addresses of members.values()) await node.dial(addresses.map((one) => multiaddr(one)))
report('joined', { peer: identity.text, members: [...members.keys()] })
setInterval(() => peer.publish(), PUBLISH_EVERY_MS)
