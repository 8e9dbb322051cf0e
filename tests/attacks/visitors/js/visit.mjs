// A js-libp2p host: connects, identifies, pings, requests its own protocol and each given one, and disconnects.
// Usage: node visit.mjs TARGET_MULTIADDR [PROTOCOL...]      Prints one line of JSON.

Promise.withResolvers ??= function () { // libp2p 3 needs it, and Node.js has it from 22 on
  let resolve, refuse
  const promise = new Promise((yes, no) => { resolve = yes; refuse = no })
  return { promise, resolve, refuse }
}

const { createLibp2p } = await import('libp2p')
const { tcp } = await import('@libp2p/tcp')
const { noise } = await import('@chainsafe/libp2p-noise')
const { yamux } = await import('@chainsafe/libp2p-yamux')
const { identify } = await import('@libp2p/identify')
const { ping } = await import('@libp2p/ping')
const { multiaddr } = await import('@multiformats/multiaddr')

const [target, ...protocols] = process.argv.slice(2)
const deadline = () => AbortSignal.timeout(10000)
const host = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: { identify: identify(), ping: ping() },
  connectionGater: { denyDialMultiaddr: () => false }
})
await host.handle('/js-chat/1.0.0', () => {})
const address = multiaddr(target)
const connection = await host.dial(address, { signal: deadline() })
const ping_ms = await host.services.ping.ping(address, { signal: deadline() })
const supported = []
for (const protocol of ['/js-chat/1.0.0', '/ipfs/kad/1.0.0', ...protocols]) {
  try {
    const stream = await connection.newStream(protocol, { signal: deadline() })
    stream.send(new Uint8Array(100))
    supported.push(protocol)
    stream.abort(new Error('leaving'))
  } catch { /* not supported there */ }
}
await new Promise(resolve => setTimeout(resolve, 1500))
await connection.close()
await host.stop()
console.log(JSON.stringify({ peer_id: host.peerId.toString(), ping_ms, supported }))
