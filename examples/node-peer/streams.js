/** Frames of the run's streams, and unary calls of hivemind's DHT. */
import { randomBytes } from 'node:crypto'
import protobuf from 'protobufjs'

const KIND = { request: 1, item: 2, end: 3 }
const [HEAD_BYTES, MAX_FRAME_BYTES] = [5, 4 << 20]

function frame (kind, payload = Buffer.alloc(0)) {
  const head = Buffer.from([kind, 0, 0, 0, 0])
  head.writeUInt32BE(payload.length, 1)
  return Buffer.concat([head, payload])
}

/** Yield the frames in these chunks. Throws if one is above the bound. */
async function * frames (chunks) {
  let buffer = Buffer.alloc(0)
  for await (const chunk of chunks) {
    buffer = Buffer.concat([buffer, chunk.subarray()])
    while (buffer.length >= HEAD_BYTES) {
      const end = HEAD_BYTES + buffer.readUInt32BE(1)
      if (end > MAX_FRAME_BYTES) throw new Error(`a frame of ${end} bytes`)
      if (buffer.length < end) break
      yield { kind: buffer[0], payload: buffer.subarray(HEAD_BYTES, end) }
      buffer = buffer.subarray(end)
    }
  }
}

/** Send `data` and yield what comes back. The writing half stays open meanwhile: its end cancels a unary call. */
async function * exchange (node, peer, protocol, data) {
  const stream = await node.dialProtocol(peer, protocol, { signal: AbortSignal.timeout(60_000) })
  const answered = Promise.withResolvers()
  const sent = stream.sink((async function * () {
    yield data
    await answered.promise
  })())
  try {
    yield * stream.source
  } finally {
    answered.resolve()
    await sent.then(() => stream.close(), () => stream.abort(new Error('cut')))
  }
}

/** Send one request. Return the items of the answer. Throws if the peer is busy or the stream breaks. */
export async function request (node, peer, protocol, question) {
  const items = []
  for await (const { kind, payload } of frames(exchange(node, peer, protocol, frame(KIND.request, question)))) {
    if (kind === KIND.item) items.push(Buffer.from(payload))
    if (kind === KIND.end) return items
  }
  throw new Error('busy, or no end frame')
}

/** Answer one request with the items that `answer` returns for its payload. */
export async function serve (stream, answer) {
  const { value } = await frames(stream.source).next()
  await stream.sink([...answer(value.payload).map((item) => frame(KIND.item, item)), frame(KIND.end)])
  await stream.close()
}

const { root } = protobuf.parse(`
  syntax = "proto3";
  message Call { bytes callId = 1; CallUnary callUnary = 3; UnaryResponse unaryResponse = 4; }
  message CallUnary { bytes peer = 1; string proto = 2; bytes data = 3; }  message UnaryResponse { bytes response = 1; }
  message FindResult { uint32 type = 1; bytes value = 2; double expiration = 3; }
  message FindRequest { repeated bytes keys = 2; }  message FindResponse { repeated FindResult results = 2; }
`)
const Call = root.lookupType('Call')

/** Return the results of hivemind's `rpc_find` for these keys, asked of one peer. */
export async function find (node, peer, keys) {
  const protocol = 'DHTProtocol.rpc_find'
  const data = root.lookupType('FindRequest').encode({ keys }).finish()
  const callUnary = { peer: peer.toMultihash().bytes, proto: protocol, data }
  const call = Call.encodeDelimited({ callId: randomBytes(16), callUnary }).finish()
  let answer = Buffer.alloc(0)
  for await (const chunk of exchange(node, peer, protocol, call)) {
    answer = Buffer.concat([answer, chunk.subarray()])
    const reader = protobuf.Reader.create(answer)
    if (reader.uint32() > answer.length - reader.pos) continue
    const { unaryResponse } = Call.decodeDelimited(answer)
    return root.lookupType('FindResponse').decode(unaryResponse.response).results
  }
  throw new Error('the directory did not answer')
}
